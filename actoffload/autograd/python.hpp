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

void describe(PyTypeObject* type, const char* name, std::size_t size, destructor dealloc, const char* doc) {
  type->tp_name = name;
  type->tp_basicsize = static_cast<Py_ssize_t>(size);
  type->tp_flags = Py_TPFLAGS_DEFAULT;
  type->tp_dealloc = dealloc;
  type->tp_doc = doc;
}

}  // namespace
