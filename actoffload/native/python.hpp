// Python's objects in C++: references that are owned, calls, numbers, truth, types.

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <iterator>
#include <new>
#include <utility>

namespace {

// A reference that is owned.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* object) : object_(object) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
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

// What a type has under a name, if it is of this kind; lives as long as the process.
template <typename Descriptor>
bool find_descriptor(PyObject* type, const char* name, const PyTypeObject* kind, Descriptor** descriptor) {
  Ref found(PyObject_GetAttrString(type, name));
  if (!found) {
    return false;
  }
  if (Py_TYPE(found.get()) != kind) {
    PyErr_Format(PyExc_TypeError, "%s is not what it was", name);
    return false;
  }
  *descriptor = reinterpret_cast<Descriptor*>(found.release());
  return true;
}

// An attribute of every tensor that is written in C: read without looking it up.
class Getter {
 public:
  bool find(PyObject* base, const char* name) { return find_descriptor(base, name, &PyGetSetDescr_Type, &descriptor_); }
  Ref operator()(PyObject* tensor) const {
    if (!PyObject_TypeCheck(tensor, descriptor_->d_common.d_type)) {  // what a patched or overridden method returned
      PyErr_Format(PyExc_AttributeError, "%.100s object where one of PyTorch's own was expected", Py_TYPE(tensor)->tp_name);
      return Ref();
    }
    const PyGetSetDef* const definition = descriptor_->d_getset;
    return Ref(definition->get(tensor, definition->closure));
  }

 private:
  PyGetSetDescrObject* descriptor_ = nullptr;
};

// A method that is written in C: called without looking it up.
class Method {
 public:
  bool find(PyObject* type, const char* name) { return find_descriptor(type, name, &PyMethodDescr_Type, &descriptor_); }
  Ref operator()(PyObject* self) const {
    if (takes(METH_NOARGS, self)) {
      return Ref(method()->ml_meth(self, nullptr));
    }
    return Ref(PyObject_Vectorcall(callable(), &self, 1, nullptr));  // checks the type of `self`
  }
  Ref operator()(PyObject* self, PyObject* argument) const {
    if (takes(METH_O, self)) {
      return Ref(method()->ml_meth(self, argument));
    }
    PyObject* const arguments[] = {self, argument};
    return Ref(PyObject_Vectorcall(callable(), arguments, 2, nullptr));
  }

 private:
  const PyMethodDef* method() const { return descriptor_->d_method; }
  // Whether it may be called directly.
  bool takes(int flags, PyObject* self) const {
    return method()->ml_flags == flags && PyObject_TypeCheck(self, descriptor_->d_common.d_type);
  }

  PyObject* callable() const { return reinterpret_cast<PyObject*>(descriptor_); }

  PyMethodDescrObject* descriptor_ = nullptr;
};

Ref call(PyObject* object, PyObject* method) {
  return Ref(PyObject_VectorcallMethod(method, &object, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

bool integer(const Ref& number, long long* value) {
  if (!number) {
    return false;
  }
  *value = PyLong_AsLongLong(number.get());
  return *value != -1 || PyErr_Occurred() == nullptr;
}

// A function of another shape than that of a method without arguments.
template <typename Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

enum class Answer { failed = -1, no = 0, yes = 1 };

Answer truth(const Ref& object) {
  if (!object) {
    return Answer::failed;
  }
  return object.get() == Py_True ? Answer::yes : object.get() == Py_False ? Answer::no : Answer::failed;
}

// Numbers as a tuple. By value: the collector may run as it is made, and change where they came from.
template <typename Numbers>
PyObject* as_tuple(const Numbers numbers) {
  Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(numbers.size())));
  for (std::size_t place = 0; tuple && place < numbers.size(); ++place) {
    PyObject* const number = PyLong_FromLongLong(numbers[place]);
    if (number == nullptr) {
      return nullptr;
    }
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(place), number);
  }
  return tuple.release();
}

// Adds to, or raises, a number that is an attribute.
bool add_to(PyObject* object, PyObject* name, long long more) {
  long long value = 0;
  if (!integer(Ref(PyObject_GetAttr(object, name)), &value)) {
    return false;
  }
  const Ref sum(PyLong_FromLongLong(value + more));
  return sum && PyObject_SetAttr(object, name, sum.get()) == 0;
}

bool raise_to(PyObject* object, PyObject* name, long long peak) {
  long long value = 0;
  if (!integer(Ref(PyObject_GetAttr(object, name)), &value)) {
    return false;
  }
  if (value >= peak) {
    return true;
  }
  const Ref higher(PyLong_FromLongLong(peak));
  return higher && PyObject_SetAttr(object, name, higher.get()) == 0;
}

void describe(PyTypeObject* type, const char* name, std::size_t size, unsigned long flags, PyGetSetDef* getters,
              const char* doc) {
  type->tp_name = name;
  type->tp_basicsize = static_cast<Py_ssize_t>(size);
  type->tp_flags = Py_TPFLAGS_DEFAULT | flags;
  type->tp_getset = getters;
  type->tp_doc = doc;
}

void make_callable(PyTypeObject* type, std::size_t vectorcall_offset) {
  type->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
  type->tp_vectorcall_offset = static_cast<Py_ssize_t>(vectorcall_offset);
  type->tp_call = PyVectorcall_Call;
}

// -- types that the collector sees -----------------------------------------------------------------------------------

PyObject** member_of(void* object, std::size_t offset) {
  return reinterpret_cast<PyObject**>(static_cast<char*>(object) + offset);
}

// `Members`: the offsets of what an object holds.
template <const auto& Members>
int traverse_members(PyObject* self, visitproc visit, void* arg) {
  for (const std::size_t offset : Members) {
    Py_VISIT(*member_of(self, offset));
  }
  return 0;
}

template <const auto& Members>
int clear_members(PyObject* self) {
  for (const std::size_t offset : Members) {
    Py_CLEAR(*member_of(self, offset));
  }
  return 0;
}

template <const auto& Members>
void dealloc_members(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear_members<Members>(self);
  Py_TYPE(self)->tp_free(self);
}

void make_collected(PyTypeObject* type, newfunc make, destructor dealloc, traverseproc traverse, inquiry clear) {
  type->tp_flags |= Py_TPFLAGS_HAVE_GC;
  type->tp_new = make;
  type->tp_dealloc = dealloc;
  type->tp_traverse = traverse;
  type->tp_clear = clear;
  type->tp_free = PyObject_GC_Del;
}

}  // namespace
