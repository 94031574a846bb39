// `Tape` and `Bursts` of schedule.py and bursts.py: the records of one forward, and backward's way through them.

#pragma once

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
  rows.seen.reserve(static_cast<std::size_t>(count));
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

}  // namespace
