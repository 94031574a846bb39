// Fields of our own classes in Python, read and written where they lie. The classes are Python's, and say what they have;
// a new record is a copy of one that Python has made, so that nothing here knows all its fields.

#pragma once

#include <structmember.h>

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
  bool raise(PyObject* object, long long peak) const {
    long long value = 0;
    return read(object, &value) && (value >= peak || write(object, peak));
  }

 private:
  Py_ssize_t offset_ = 0;
};

#define ACTOFFLOAD_RECORD_FIELDS(X)                                                                                \
  X(number) X(state) X(address) X(begin) X(end) X(nbytes) X(data) X(data_begin) X(weak_data) X(identity) X(handles) \
  X(waiting) X(round) X(tape) X(index) X(module) X(kind) X(stays) X(counted) X(wanted) X(on_disk) X(extent)         \
  X(transfer) X(io) X(slot) X(error) X(was_resized)

#define ACTOFFLOAD_ACCOUNTS_FIELDS(X)                                                                           \
  X(notes) X(kept_bytes) X(packed_tensors) X(packed_bytes) X(deduplicated_bytes) X(moved_bytes) X(live_records) \
  X(resident_bytes) X(resident_peak_bytes) X(step_peak_bytes) X(baseline_bytes) X(baseline_peak_bytes)          \
  X(recomputed_bytes)

// The running counts of an offloader.
struct Counts {
  PyObject* accounts;  // the class
#define ACTOFFLOAD_DECLARE(name) Slot name;
  ACTOFFLOAD_ACCOUNTS_FIELDS(ACTOFFLOAD_DECLARE)
#undef ACTOFFLOAD_DECLARE

  bool find() {
#define ACTOFFLOAD_FIND(name)        \
  if (!name.find(accounts, #name)) { \
    return false;                    \
  }
    ACTOFFLOAD_ACCOUNTS_FIELDS(ACTOFFLOAD_FIND)
#undef ACTOFFLOAD_FIND
    return true;
  }
} counts;

// Whether something is an `Accounts`; an error, if not.
bool is_accounts(PyObject* object) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == counts.accounts) {
    return true;
  }
  PyErr_Format(PyExc_TypeError, "accounts: an Accounts, not %.100s", Py_TYPE(object)->tp_name);
  return false;
}

// The classes, and what is asked of them here.
struct Fields {
  PyObject *record, *joint, *row, *phases;  // the classes
#define ACTOFFLOAD_DECLARE(name) Slot name;
  ACTOFFLOAD_RECORD_FIELDS(ACTOFFLOAD_DECLARE)
#undef ACTOFFLOAD_DECLARE
  Slot joint_records, joint_nbytes, row_users, row_records, row_starts, row_offsets, row_io_bytes, row_apart, phases_changes;

  bool find() {
#define ACTOFFLOAD_FIND(name)        \
  if (!name.find(record, #name)) {   \
    return false;                    \
  }
    ACTOFFLOAD_RECORD_FIELDS(ACTOFFLOAD_FIND)
#undef ACTOFFLOAD_FIND
    return joint_records.find(joint, "records") && joint_nbytes.find(joint, "nbytes") && row_users.find(row, "users") &&
           row_records.find(row, "records") && row_starts.find(row, "starts") && row_offsets.find(row, "offsets") &&
           row_io_bytes.find(row, "io_bytes") && row_apart.find(row, "apart") && phases_changes.find(phases, "changes");
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
