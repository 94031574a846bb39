// Fields of our own classes in Python, read and written where they lie. The classes are Python's, and say what they have;
// a new record is a copy of one that Python has made, so that nothing here knows all its fields.

#pragma once

#include "known.hpp"

namespace {

// A field in `__slots__` of a class.
class Slot {
 public:
  bool find(PyObject* type, const char* name) {
    PyMemberDescrObject* member;
    if (!find_descriptor(type, name, &PyMemberDescr_Type, &member)) {
      return false;
    }
    offset_ = member->d_member->offset;
    return true;
  }
  PyObject** at(PyObject* object) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
  }
  PyObject* operator()(PyObject* object) const { return *at(object); }  // borrowed; null where nothing was ever put there
  bool is(PyObject* object, PyObject* value) const { return *at(object) == value; }
  bool nothing(PyObject* object) const { return *at(object) == Py_None; }
  // What was there before may go, and Python may run as it does.
  void set(PyObject* object, PyObject* value) const { Py_XSETREF(*at(object), Py_NewRef(value)); }
  bool set(PyObject* object, Ref value) const {
    if (!value) {
      return false;
    }
    Py_XSETREF(*at(object), value.release());
    return true;
  }
  bool read(PyObject* object, long long* value) const {
    PyObject* const number = *at(object);
    if (number == nullptr) {
      PyErr_SetString(PyExc_AttributeError, "a field was never set");
      return false;
    }
    *value = PyLong_AsLongLong(number);
    return *value != -1 || PyErr_Occurred() == nullptr;
  }
  bool write(PyObject* object, long long value) const { return set(object, Ref(PyLong_FromLongLong(value))); }
  bool add(PyObject* object, long long more) const {
    long long value = 0;
    return read(object, &value) && write(object, value + more);
  }

 private:
  Py_ssize_t offset_ = 0;
};

#define ACTOFFLOAD_RECORD_FIELDS(X)                                                                                \
  X(number) X(state) X(address) X(begin) X(end) X(nbytes) X(data) X(data_begin) X(weak_data) X(identity) X(handles) \
  X(waiting) X(round) X(tape) X(index) X(module) X(kind) X(stays) X(counted) X(wanted) X(on_disk) X(extent)         \
  X(transfer) X(io) X(slot) X(error) X(was_resized)

// The classes, and what is asked of them here.
struct Fields {
  PyObject *record, *joint, *row;  // the classes
#define ACTOFFLOAD_DECLARE(name) Slot name;
  ACTOFFLOAD_RECORD_FIELDS(ACTOFFLOAD_DECLARE)
#undef ACTOFFLOAD_DECLARE
  Slot joint_records, joint_nbytes, row_users;

  bool find() {
#define ACTOFFLOAD_FIND(name)        \
  if (!name.find(record, #name)) {   \
    return false;                    \
  }
    ACTOFFLOAD_RECORD_FIELDS(ACTOFFLOAD_FIND)
#undef ACTOFFLOAD_FIND
    return joint_records.find(joint, "records") && joint_nbytes.find(joint, "nbytes") && row_users.find(row, "users");
  }
} fields;

// Whether something is a `Record` of Python's.
bool is_record(PyObject* object) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == fields.record; }

// A new record that is as `like` is.
Ref copy_record(PyObject* like) {
  PyTypeObject* const type = Py_TYPE(like);
  Ref record(type->tp_alloc(type, 0));
  if (record) {
    for (const PyMemberDef* member = type->tp_members; member != nullptr && member->name != nullptr; ++member) {
      Py_XSETREF(*member_of(record.get(), static_cast<std::size_t>(member->offset)),
                 Py_XNewRef(*member_of(like, static_cast<std::size_t>(member->offset))));
    }
  }
  return record;
}

}  // namespace
