// A piece of host memory that gives its slot back when nobody holds it: what tensors on a `HostPool` are made of.

#pragma once

#include "python.hpp"

namespace {

struct Piece {
  PyObject_HEAD
  PyObject* slot;
  void* address;
  Py_ssize_t nbytes;
};

// Piece(address, nbytes, slot): memory that `slot` keeps.
PyObject* piece_new(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  long long address = 0;
  Py_ssize_t nbytes = 0;
  PyObject* slot;
  if (names != nullptr && PyDict_GET_SIZE(names) != 0) {
    PyErr_SetString(PyExc_TypeError, "Piece(address, nbytes, slot)");
    return nullptr;
  }
  if (!PyArg_ParseTuple(arguments, "LnO:Piece", &address, &nbytes, &slot)) {
    return nullptr;
  }
  Piece* const piece = PyObject_New(Piece, type);
  if (piece != nullptr) {
    piece->slot = Py_NewRef(slot);
    piece->address = reinterpret_cast<void*>(address);
    piece->nbytes = nbytes;
  }
  return reinterpret_cast<PyObject*>(piece);
}

void piece_dealloc(PyObject* self) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Py_DECREF(reinterpret_cast<Piece*>(self)->slot);  // notes its return
  PyErr_Restore(type, value, trace);
  PyObject_Free(self);
}

int piece_buffer(PyObject* self, Py_buffer* view, int flags) {
  const Piece* const piece = reinterpret_cast<Piece*>(self);
  return PyBuffer_FillInfo(view, self, piece->address, piece->nbytes, 0, flags);
}

PyBufferProcs piece_as_buffer = {piece_buffer, nullptr};

PyTypeObject piece_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void describe_piece() {
  describe(&piece_type, "actoffload_hooks.Piece", sizeof(Piece), 0, nullptr,
           "Memory of a slot, which goes back when the last who uses it is gone.");
  piece_type.tp_new = piece_new;
  piece_type.tp_dealloc = piece_dealloc;
  piece_type.tp_as_buffer = &piece_as_buffer;
}

}  // namespace
