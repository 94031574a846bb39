// Copies between buffers, with Python's lock given back once for all of them.

#pragma once

#include <cstring>
#include <vector>

#include "python.hpp"

namespace {

// Buffers that are held until all is copied: where to and where from, in turns.
class Buffers {
 public:
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  ~Buffers() {
    for (Py_buffer& one : held_) {
      PyBuffer_Release(&one);
    }
  }
  bool reserve(Py_ssize_t copies) {
    try {
      held_.reserve(2 * static_cast<std::size_t>(copies));
      return true;
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
      return false;
    }
  }
  // `part`: (to, from), of one size. What was reserved is enough for it.
  bool hold(PyObject* part) {
    if (!PyTuple_Check(part) || PyTuple_GET_SIZE(part) != 2) {
      PyErr_Format(PyExc_TypeError, "parts: a sequence of (to, from), not %R", part);
      return false;
    }
    if (!hold(PyTuple_GET_ITEM(part, 0), PyBUF_WRITABLE) || !hold(PyTuple_GET_ITEM(part, 1), PyBUF_SIMPLE)) {
      return false;
    }
    const Py_ssize_t room = held_[held_.size() - 2].len, nbytes = held_.back().len;
    if (room != nbytes) {
      PyErr_Format(PyExc_ValueError, "%zd bytes to a buffer of %zd", nbytes, room);
    }
    return room == nbytes;
  }
  void copy() const {
    for (std::size_t place = 0; place < held_.size(); place += 2) {
      std::memmove(held_[place].buf, held_[place + 1].buf, static_cast<std::size_t>(held_[place].len));
    }
  }

 private:
  bool hold(PyObject* object, int flags) {
    Py_buffer buffer;
    if (PyObject_GetBuffer(object, &buffer, flags) < 0) {
      return false;
    }
    held_.push_back(buffer);
    return true;
  }

  std::vector<Py_buffer> held_;
};

// copy(parts): each part is (to, from): two buffers of one size.
PyObject* copy(PyObject*, PyObject* parts) {
  const Ref row(PySequence_Tuple(parts));  // nobody else can change it meanwhile
  Buffers buffers;
  if (!row || !buffers.reserve(PyTuple_GET_SIZE(row.get()))) {
    return nullptr;
  }
  for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(row.get()); ++place) {
    if (!buffers.hold(PyTuple_GET_ITEM(row.get(), place))) {
      return nullptr;
    }
  }
  Py_BEGIN_ALLOW_THREADS;
  buffers.copy();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

}  // namespace
