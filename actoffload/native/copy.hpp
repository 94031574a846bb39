// Copies between ranges of memory, with Python's lock given back once for all of them.

#pragma once

#include <cstring>
#include <vector>

#include "python.hpp"

namespace {

struct Copy {
  void* to;
  const void* from;
  std::size_t nbytes;
};

// copy(parts): each part is (to, from, nbytes): addresses, and bytes.
PyObject* copy(PyObject*, PyObject* parts) {
  const Ref row(PySequence_Fast(parts, "parts: a sequence of (to, from, nbytes)"));
  if (!row) {
    return nullptr;
  }
  std::vector<Copy> copies;
  for (Py_ssize_t place = 0; place < PySequence_Fast_GET_SIZE(row.get()); ++place) {
    unsigned long long to = 0, from = 0;
    Py_ssize_t nbytes = 0;
    PyObject* const part = PySequence_Fast_GET_ITEM(row.get(), place);
    if (!PyTuple_Check(part)) {
      return PyErr_Format(PyExc_TypeError, "parts: a sequence of (to, from, nbytes), not %R", part);
    }
    if (!PyArg_ParseTuple(part, "KKn:copy", &to, &from, &nbytes)) {
      return nullptr;
    }
    if (nbytes < 0) {
      return PyErr_Format(PyExc_ValueError, "nbytes=%zd: must not be negative", nbytes);
    }
    try {
      copies.push_back({reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), static_cast<std::size_t>(nbytes)});
    } catch (const std::bad_alloc&) {
      return PyErr_NoMemory();
    }
  }
  Py_BEGIN_ALLOW_THREADS;
  for (const Copy& one : copies) {
    std::memmove(one.to, one.from, one.nbytes);
  }
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

}  // namespace
