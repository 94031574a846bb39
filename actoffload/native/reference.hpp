// `StorageRef` of identity.py: a weak reference to a storage.

#pragma once

#include <structmember.h>

#include "tensor.hpp"

namespace {

struct Reference {
  PyObject_HEAD
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  PyObject* number;  // what PyTorch calls a weak pointer: an integer
};

extern PyTypeObject reference_type;

Ref make_reference(const c10::Storage& storage) {
  Ref number(PyLong_FromLongLong(number_of_storage(storage.unsafeGetStorageImpl())));
  Reference* const reference = number ? PyObject_New(Reference, &reference_type) : nullptr;
  if (reference != nullptr) {
    new (&reference->storage) c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl());
    reference->number = number.release();
  }
  return Ref(reinterpret_cast<PyObject*>(reference));
}

Ref make_reference(PyObject* storage) {
  const c10::Storage* const found = storage_in(storage);
  return found == nullptr ? Ref() : make_reference(*found);
}

PyObject* reference_new(PyTypeObject*, PyObject* arguments, PyObject* names) {
  PyObject* storage;
  if (names != nullptr && PyDict_GET_SIZE(names) != 0) {
    PyErr_SetString(PyExc_TypeError, "StorageRef takes one storage");
    return nullptr;
  }
  return PyArg_ParseTuple(arguments, "O:StorageRef", &storage) ? make_reference(storage).release() : nullptr;
}

void reference_dealloc(PyObject* self) {
  Reference* const reference = reinterpret_cast<Reference*>(self);
  reference->storage.~weak_intrusive_ptr();
  Py_DECREF(reference->number);
  PyObject_Free(self);
}

PyObject* reference_gone(PyObject* self, PyObject*) {
  return PyBool_FromLong(reinterpret_cast<Reference*>(self)->storage.expired());
}

PyObject* reference_lock(PyObject* self, PyObject*) {
  return PyObject_CallOneArg(known.weak_ref_lock, reinterpret_cast<Reference*>(self)->number);
}

PyMethodDef reference_methods[] = {
    {"gone", reference_gone, METH_NOARGS, "Whether the storage has died."},
    {"lock", reference_lock, METH_NOARGS, "The storage, or None if it is gone."},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef reference_members[] = {
    {"cdata", T_OBJECT, offsetof(Reference, number), READONLY, "The storage's number, as long as this lives."},
    {nullptr, 0, 0, 0, nullptr}};

PyTypeObject reference_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

void describe_reference() {
  describe(&reference_type, "actoffload_hooks.StorageRef", sizeof(Reference), 0, nullptr,
           "A weak reference to a storage: it pins only its identity.");
  reference_type.tp_methods = reference_methods;
  reference_type.tp_members = reference_members;
  reference_type.tp_new = reference_new;
  reference_type.tp_dealloc = reference_dealloc;
}

}  // namespace
