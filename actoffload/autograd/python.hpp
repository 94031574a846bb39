// Python objects in C++: owned references, and the parts of a type description that the hooks share.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <utility>

namespace {

// An owned reference, or null.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* object) : object_(object) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  Ref& operator=(Ref&& other) noexcept {
    Py_XSETREF(object_, other.release());
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  explicit operator bool() const { return object_ != nullptr; }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

// Keeps the error that is set, if any, while something else may set and clear errors.
class ErrorKept {
 public:
  ErrorKept() { PyErr_Fetch(&type_, &value_, &trace_); }
  ErrorKept(const ErrorKept&) = delete;
  ErrorKept& operator=(const ErrorKept&) = delete;
  ~ErrorKept() { PyErr_Restore(type_, value_, trace_); }

 private:
  PyObject *type_, *value_, *trace_;
};

// Whether a call has one positional argument and no other; false with an error.
bool one_argument(std::size_t flags, PyObject* names, const char* message) {
  if (PyVectorcall_NARGS(flags) == 1 && (names == nullptr || PyTuple_GET_SIZE(names) == 0)) {
    return true;
  }
  PyErr_SetString(PyExc_TypeError, message);
  return false;
}

void describe(PyTypeObject* type, const char* name, std::size_t size, destructor dealloc, const char* doc) {
  type->tp_name = name;
  type->tp_basicsize = static_cast<Py_ssize_t>(size);
  type->tp_flags = Py_TPFLAGS_DEFAULT;
  type->tp_dealloc = dealloc;
  type->tp_doc = doc;
}

// Makes the instances of a type callable as hooks. PyTorch's compiler does not trace into them.
void make_hook(PyTypeObject* type, std::size_t vectorcall_offset) {
  type->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
  type->tp_vectorcall_offset = static_cast<Py_ssize_t>(vectorcall_offset);
  type->tp_call = PyVectorcall_Call;
}

bool ready(PyTypeObject* type) {
  if (PyType_Ready(type) < 0) {
    return false;
  }
  return type->tp_call == nullptr || PyDict_SetItemString(type->tp_dict, "_torchdynamo_disable", Py_True) == 0;
}

}  // namespace
