// What Python is given of a tape.

#pragma once

#include <structmember.h>

#include "tape.hpp"

namespace {

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
  describe(&tape_type, "actoffload_hooks.Tape", sizeof(Tape), 0, tape_getters,
           "The records of one forward in the order in which autograd saved them, and backward's way through them.");
  tape_sequence.sq_length = tape_length;
  tape_type.tp_as_sequence = &tape_sequence;
  tape_type.tp_methods = tape_methods;
  tape_type.tp_members = tape_members;
  make_collected(&tape_type, tape_new, tape_dealloc, tape_traverse, tape_clear);
}

}  // namespace
