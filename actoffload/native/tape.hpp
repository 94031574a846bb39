// `Tape` and `Bursts` of schedule.py and bursts.py: the records of one forward, and backward's way through them.

#pragma once

#include <structmember.h>

#include <cstdint>
#include <vector>

#include "known.hpp"

namespace {

constexpr long long kMany = 8;  // MANY of bursts.py; compared when the module is set up
constexpr long long kNotAhead = -1;

extern PyTypeObject tape_type;

// Whether a record stays for as long as it lives, so that it is never fetched; defined where those are.
bool stays(PyObject* record);

struct Tape {
  struct Rows {
    std::vector<PyObject*> records;  // owned; null where one was released
    std::vector<Py_ssize_t> order, position, seen;  // position: by index, -1 where the order lacks it
    std::vector<long long> reach{0};
    std::vector<long long> ahead;  // by index: bytes that fetching it made, or kNotAhead
    std::vector<char> was_seen;
  };
  PyObject_HEAD
  Rows* rows;
  PyObject* decisions;
  long long live, total_bytes, signature;
  Py_ssize_t prepared, cursor, frontier;
  long long ahead_bytes, window_bytes;
  long long idle_at, idle_below;
  long long node, count, node_bytes, largest_bytes, largest_count;  // of the burst
  char in_backward;

  Py_ssize_t size() const { return static_cast<Py_ssize_t>(rows->records.size()); }
  bool exhausted() const { return frontier >= static_cast<Py_ssize_t>(rows->order.size()); }
};

Tape* as_tape(PyObject* object) { return reinterpret_cast<Tape*>(object); }

// Adds a record of so many bytes; its index, or -1 with an error.
Py_ssize_t tape_append(Tape* tape, PyObject* record, long long nbytes) {
  Tape::Rows& rows = *tape->rows;
  try {
    rows.ahead.push_back(kNotAhead);
    rows.was_seen.push_back(0);
    rows.records.push_back(record);
  } catch (const std::bad_alloc&) {
    rows.ahead.resize(rows.records.size());
    rows.was_seen.resize(rows.records.size());
    PyErr_NoMemory();
    return -1;
  }
  Py_INCREF(record);
  ++tape->live;
  tape->total_bytes += nbytes;
  const std::uint64_t mixed =
      (static_cast<std::uint64_t>(tape->signature) * 0x9E3779B97F4A7C15u) ^ (static_cast<std::uint64_t>(nbytes) + 1);
  tape->signature = static_cast<long long>(mixed ^ (mixed >> 29));
  return tape->size() - 1;
}

void tape_uncount(Tape* tape, Py_ssize_t index) {
  long long& ahead = tape->rows->ahead[static_cast<std::size_t>(index)];
  if (ahead != kNotAhead) {
    tape->ahead_bytes -= ahead;
    ahead = kNotAhead;
  }
}

// The record at an index was released; who calls holds a reference to it.
void tape_forget(Tape* tape, Py_ssize_t index) {
  tape_uncount(tape, index);
  PyObject* const record = std::exchange(tape->rows->records[static_cast<std::size_t>(index)], nullptr);
  if (record != nullptr) {
    --tape->live;
    Py_DECREF(record);
  }
}

// Backward has reached a record; the tape is prepared. Allocates nothing that Python's collector knows.
bool tape_advance(Tape* tape, Py_ssize_t index) {
  Tape::Rows& rows = *tape->rows;
  const auto at = static_cast<std::size_t>(index);
  if (!rows.was_seen[at]) {
    try {
      rows.seen.push_back(index);
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
      return false;
    }
    rows.was_seen[at] = 1;
  }
  tape->in_backward = 1;
  tape_uncount(tape, index);
  const Py_ssize_t position = at < rows.position.size() ? rows.position[at] : -1;
  if (position >= 0) {
    tape->cursor = tape->cursor > position + 1 ? tape->cursor : position + 1;
    tape->frontier = tape->frontier > tape->cursor ? tape->frontier : tape->cursor;
  }
  return true;
}

long long bytes_of(PyObject* record) {
  long long nbytes = 0;
  return integer(Ref(PyObject_GetAttr(record, name_nbytes)), &nbytes) ? nbytes : -1;
}

// Chooses the order; `found` is what was learned, or None.
bool tape_order(Tape* tape, PyObject* found) {
  Tape::Rows& rows = *tape->rows;
  const Py_ssize_t count = tape->size();
  std::vector<Py_ssize_t> order, position(static_cast<std::size_t>(count), -1);
  std::vector<long long> reach{0};
  if (found == Py_None) {
    for (Py_ssize_t index = count - 1; index >= 0; --index) {
      order.push_back(index);
    }
  } else {
    const Ref row(PySequence_Fast(found, "an order is a sequence"));
    if (!row) {
      return false;
    }
    for (Py_ssize_t place = 0; place < PySequence_Fast_GET_SIZE(row.get()); ++place) {
      const Py_ssize_t index = PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(row.get(), place));
      if (index < 0 || index >= count) {
        if (PyErr_Occurred() == nullptr) {
          PyErr_SetString(PyExc_IndexError, "an order names a record that the tape does not have");
        }
        return false;
      }
      order.push_back(index);
    }
  }
  for (const Py_ssize_t index : order) {
    PyObject* const record = rows.records[static_cast<std::size_t>(index)];
    const long long nbytes = record == nullptr ? 0 : bytes_of(record);
    if (nbytes < 0) {
      return false;
    }
    position[static_cast<std::size_t>(index)] = static_cast<Py_ssize_t>(reach.size()) - 1;
    reach.push_back(reach.back() + nbytes);
  }
  rows.order.swap(order);
  rows.position.swap(position);
  rows.reach.swap(reach);
  tape->prepared = count;
  tape->cursor = tape->frontier = 0;
  return true;
}

bool tape_prepare(Tape* tape, PyObject* orders) {
  if (tape->prepared == tape->size()) {
    return true;
  }
  const Ref signature(PyLong_FromLongLong(tape->signature));
  const Ref found(signature ? PyObject_CallMethodOneArg(orders, name_get, signature.get()) : nullptr);
  try {
    return found && tape_order(tape, found.get());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
}

// What lies at the frontier: nothing any more, a record that is passed by, or one that is to be fetched.
enum class Next { nothing, passed, fetch };

Next tape_next(Tape* tape, Py_ssize_t* index, bool* early) {
  Tape::Rows& rows = *tape->rows;
  if (tape->exhausted() || tape->ahead_bytes >= tape->window_bytes) {
    return Next::nothing;
  }
  *index = rows.order[static_cast<std::size_t>(tape->frontier)];
  const auto at = static_cast<std::size_t>(*index);
  PyObject* const record = rows.records[at];
  if (record == nullptr || rows.ahead[at] != kNotAhead) {
    return Next::passed;
  }
  if (stays(record)) {
    rows.ahead[at] = 0;
    return Next::passed;
  }
  const auto frontier = static_cast<std::size_t>(tape->frontier), cursor = static_cast<std::size_t>(tape->cursor);
  *early = rows.reach[frontier] - rows.reach[cursor] >= tape->window_bytes;
  return Next::fetch;
}

// Passes by what needs no fetching; whether that is all that there is to do now.
Answer tape_full(Tape* tape) {
  Py_ssize_t index = 0;
  bool early = false;
  for (;;) {
    const Next next = tape_next(tape, &index, &early);
    if (next == Next::nothing) {
      return Answer::yes;
    }
    if (next == Next::fetch) {
      if (!early) {
        return Answer::no;
      }
      const Ref data(PyObject_GetAttr(tape->rows->records[static_cast<std::size_t>(index)], name_data));
      return !data ? Answer::failed : data.get() == Py_None ? Answer::yes : Answer::no;
    }
    ++tape->frontier;
  }
}

// Whether it was found that there is nothing to look for, and nothing has changed since.
bool tape_idle(const Tape* tape, long long changes) {
  return tape->idle_at == changes && tape->total_bytes < tape->idle_below;
}

// Counts a storage that a node saves; whether the node is in the middle of a burst.
bool burst_saved(Tape* tape, long long node, long long nbytes) {
  if (node != tape->node) {
    tape->node = node;
    tape->count = tape->node_bytes = 0;
  }
  ++tape->count;
  tape->node_bytes += nbytes;
  if (tape->count < kMany) {
    return false;
  }
  if (tape->node_bytes > tape->largest_bytes) {
    tape->largest_bytes = tape->node_bytes;
    tape->largest_count = tape->count;
  }
  return true;
}

// -- the type --------------------------------------------------------------------------------------------------------

PyObject* tape_new(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  if (PyTuple_GET_SIZE(arguments) != 0 || (names != nullptr && PyDict_GET_SIZE(names) != 0)) {
    PyErr_SetString(PyExc_TypeError, "Tape takes no arguments");
    return nullptr;
  }
  Ref self(type->tp_alloc(type, 0));
  if (!self) {
    return nullptr;
  }
  Tape* const tape = as_tape(self.get());
  tape->rows = new (std::nothrow) Tape::Rows;
  tape->decisions = PyList_New(0);
  tape->node = tape->idle_at = -1;
  if (tape->rows == nullptr) {
    PyErr_NoMemory();
  }
  return tape->rows != nullptr && tape->decisions != nullptr ? self.release() : nullptr;
}

int tape_traverse(PyObject* self, visitproc visit, void* arg) {
  Tape* const tape = as_tape(self);
  if (tape->rows != nullptr) {
    for (PyObject* record : tape->rows->records) {
      Py_VISIT(record);
    }
  }
  Py_VISIT(tape->decisions);
  return 0;
}

int tape_clear(PyObject* self) {
  Tape* const tape = as_tape(self);
  if (tape->rows != nullptr) {
    for (std::size_t at = 0; at < tape->rows->records.size(); ++at) {
      Py_CLEAR(tape->rows->records[at]);
    }
  }
  Py_CLEAR(tape->decisions);
  return 0;
}

void tape_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  tape_clear(self);
  delete as_tape(self)->rows;
  Py_TYPE(self)->tp_free(self);
}

Py_ssize_t tape_index(Tape* tape, PyObject* number) {
  const Py_ssize_t index = PyLong_AsSsize_t(number);
  if (index == -1 && PyErr_Occurred() != nullptr) {
    return -1;
  }
  if (index < 0 || index >= tape->size()) {
    PyErr_SetString(PyExc_IndexError, "the tape has no such record");
    return -1;
  }
  return index;
}

PyObject* tape_append_(PyObject* self, PyObject* record) {
  const long long nbytes = bytes_of(record);
  const Py_ssize_t index = nbytes < 0 ? -1 : tape_append(as_tape(self), record, nbytes);
  return index < 0 ? nullptr : PyLong_FromSsize_t(index);
}

PyObject* tape_forget_(PyObject* self, PyObject* number) {
  const Py_ssize_t index = tape_index(as_tape(self), number);
  if (index < 0) {
    return nullptr;
  }
  tape_forget(as_tape(self), index);
  Py_RETURN_NONE;
}

PyObject* as_tuple(const std::vector<Py_ssize_t> indices) {  // a copy: the collector may run as the tuple is made
  Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(indices.size())));
  for (std::size_t place = 0; tuple && place < indices.size(); ++place) {
    PyObject* const index = PyLong_FromSsize_t(indices[place]);
    if (index == nullptr) {
      return nullptr;
    }
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(place), index);
  }
  return tuple.release();
}

PyObject* tape_learned(PyObject* self, PyObject*) {
  const std::vector<Py_ssize_t>& seen = as_tape(self)->rows->seen;
  return seen.empty() ? Py_NewRef(Py_None) : as_tuple(seen);
}

PyObject* tape_order_(PyObject* self, void*) { return as_tuple(as_tape(self)->rows->order); }

PyObject* tape_advance_(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  Tape* const tape = as_tape(self);
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "advance(index, orders)");
    return nullptr;
  }
  const Py_ssize_t index = tape_index(tape, arguments[0]);
  if (index < 0 || !tape_prepare(tape, arguments[1]) || !tape_advance(tape, index)) {
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* tape_prepare_(PyObject* self, PyObject* orders) {
  return tape_prepare(as_tape(self), orders) ? Py_NewRef(Py_None) : nullptr;
}

PyObject* tape_rewind(PyObject* self, PyObject*) {
  as_tape(self)->cursor = as_tape(self)->frontier = 0;
  Py_RETURN_NONE;
}

PyObject* tape_fetch_ahead(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  Tape* const tape = as_tape(self);
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "fetch_ahead(window_bytes, fetch)");
    return nullptr;
  }
  const long long window = PyLong_AsLongLong(arguments[0]);
  if (window == -1 && PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  tape->window_bytes = window;
  Py_ssize_t index = 0;
  bool early = false;
  for (Next next; (next = tape_next(tape, &index, &early)) != Next::nothing; ++tape->frontier) {
    if (next == Next::passed) {
      continue;
    }
    const auto at = static_cast<std::size_t>(index);
    const Ref record(Py_NewRef(tape->rows->records[at]));
    PyObject* const given[] = {record.get(), early ? Py_True : Py_False};
    const Ref made(PyObject_Vectorcall(arguments[1], given, 2, nullptr));
    long long nbytes = 0;
    if (made && made.get() == Py_None) {
      break;
    }
    if (!made || !integer(made, &nbytes)) {
      return nullptr;
    }
    tape->rows->ahead[at] = nbytes;
    tape->ahead_bytes += nbytes;
  }
  Py_RETURN_NONE;
}

PyObject* tape_idle_until(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "idle_until(changes, nbytes)");
    return nullptr;
  }
  const long long changes = PyLong_AsLongLong(arguments[0]), nbytes = PyLong_AsLongLong(arguments[1]);
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  as_tape(self)->idle_at = changes;
  as_tape(self)->idle_below = nbytes;
  Py_RETURN_NONE;
}

PyObject* tape_idle_(PyObject* self, PyObject* changes) {
  const long long now = PyLong_AsLongLong(changes);
  return PyErr_Occurred() != nullptr ? nullptr : PyBool_FromLong(tape_idle(as_tape(self), now));
}

PyObject* tape_saved(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "saved(node, nbytes)");
    return nullptr;
  }
  const long long node = PyLong_AsLongLong(arguments[0]), nbytes = PyLong_AsLongLong(arguments[1]);
  return PyErr_Occurred() != nullptr ? nullptr : PyBool_FromLong(burst_saved(as_tape(self), node, nbytes));
}

PyObject* tape_records(PyObject* self, void*) {
  const std::vector<PyObject*>& records = as_tape(self)->rows->records;
  const std::size_t count = records.size();  // the collector may run as the list is made, and whoever it calls add one
  Ref list(PyList_New(static_cast<Py_ssize_t>(count)));
  for (std::size_t at = 0; list && at < count; ++at) {
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(at), Py_NewRef(records[at] != nullptr ? records[at] : Py_None));
  }
  return list.release();
}

PyObject* tape_exhausted(PyObject* self, void*) { return PyBool_FromLong(as_tape(self)->exhausted()); }

PyObject* tape_left_bytes(PyObject* self, void*) {
  const Tape* const tape = as_tape(self);
  return PyLong_FromLongLong(tape->rows->reach.back() - tape->rows->reach[static_cast<std::size_t>(tape->cursor)]);
}

PyObject* tape_bursts(PyObject* self, void*) { return Py_NewRef(self); }

Py_ssize_t tape_length(PyObject* self) { return as_tape(self)->size(); }

PyMethodDef tape_methods[] = {
    {"append", tape_append_, METH_O, "Add a record; returns its index."},
    {"forget", tape_forget_, METH_O, "The record at an index was released."},
    {"learned", tape_learned, METH_NOARGS, "The order in which backward walked, if it walked at all."},
    {"advance", as_method(tape_advance_), METH_FASTCALL, "Backward has reached the record at an index."},
    {"prepare", tape_prepare_, METH_O, "The forward has ended: choose the order in which backward will come."},
    {"rewind", tape_rewind, METH_NOARGS, "Backward starts over."},
    {"fetch_ahead", as_method(tape_fetch_ahead), METH_FASTCALL, "Fetch what backward will want next."},
    {"idle_until", as_method(tape_idle_until), METH_FASTCALL, "There is nothing to look for until then."},
    {"idle", tape_idle_, METH_O, "Whether that still holds."},
    {"saved", as_method(tape_saved), METH_FASTCALL, "A node saves a storage; whether it is in the middle of a burst."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef tape_members[] = {{"live", T_LONGLONG, offsetof(Tape, live), READONLY, "Records that were not released."},
                              {"total_bytes", T_LONGLONG, offsetof(Tape, total_bytes), READONLY, "Of all records."},
                              {"signature", T_LONGLONG, offsetof(Tape, signature), READONLY, "Of the sizes, in order."},
                              {"in_backward", T_BOOL, offsetof(Tape, in_backward), 0, "Backward has begun."},
                              {"decisions", T_OBJECT, offsetof(Tape, decisions), READONLY, "What was decided."},
                              {"node_bytes", T_LONGLONG, offsetof(Tape, node_bytes), READONLY, "As of `Bursts`."},
                              {"largest_bytes", T_LONGLONG, offsetof(Tape, largest_bytes), READONLY, "As of `Bursts`."},
                              {"largest_count", T_LONGLONG, offsetof(Tape, largest_count), READONLY, "As of `Bursts`."},
                              {nullptr, 0, 0, 0, nullptr}};

PyGetSetDef tape_getters[] = {
    {"records", tape_records, nullptr, "The records in order; None where one was released.", nullptr},
    {"order", tape_order_, nullptr, "The indices in the order in which backward is expected to come.", nullptr},
    {"exhausted", tape_exhausted, nullptr, "Whether nothing is left to fetch.", nullptr},
    {"left_bytes", tape_left_bytes, nullptr, "Bytes that lie before backward on this tape.", nullptr},
    {"bursts", tape_bursts, nullptr, "What the nodes of this forward saved at once.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PySequenceMethods tape_sequence = {};

PyTypeObject tape_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void describe_tape() {
  describe(&tape_type, "actoffload_hooks.Tape", sizeof(Tape), Py_TPFLAGS_HAVE_GC, tape_getters,
           "The records of one forward in the order in which autograd saved them, and backward's way through them.");
  tape_sequence.sq_length = tape_length;
  tape_type.tp_as_sequence = &tape_sequence;
  tape_type.tp_methods = tape_methods;
  tape_type.tp_members = tape_members;
  tape_type.tp_new = tape_new;
  tape_type.tp_dealloc = tape_dealloc;
  tape_type.tp_traverse = tape_traverse;
  tape_type.tp_clear = tape_clear;
  tape_type.tp_free = PyObject_GC_Del;
}

}  // namespace
