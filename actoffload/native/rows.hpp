// What is done for each record of a row, of row_tier.py.

#pragma once

#include "inside.hpp"
#include "slots.hpp"

namespace {

bool only_records(PyObject* records) {
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(records); ++place) {
    if (!is_record(PyList_GET_ITEM(records, place))) {
      PyErr_SetString(PyExc_TypeError, "records: a list of Record");
      return false;
    }
  }
  return true;
}

// Whether the owner of a storage that is being moved has freed or resized it: `Mover.resized`.
Answer resized(PyObject* record) {
  if (!fields.state.is(record, known.spilling) || fields.data.nothing(record)) {
    return Answer::no;
  }
  if (fields.was_resized.is(record, Py_True)) {
    return Answer::yes;
  }
  long long now = 0, then = 0;
  const Ref data(Py_NewRef(fields.data(record)));
  if (!integer(known.data_ptr(data.get()), &now) || !fields.address.read(record, &then)) {
    return Answer::failed;
  }
  return now != then ? Answer::yes : Answer::no;
}

// resized(records): those of records that are being moved whose owner has freed or resized them.
PyObject* all_resized(PyObject*, PyObject* records) {
  Ref found(PyList_New(0));
  if (!found || !PyList_Check(records) || !only_records(records)) {
    return PyErr_Occurred() != nullptr ? nullptr : PyErr_Format(PyExc_TypeError, "records: a list");
  }
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(records); ++place) {
    PyObject* const record = PyList_GET_ITEM(records, place);
    const Answer is = resized(record);
    if (is == Answer::failed || (is == Answer::yes && PyList_Append(found.get(), record) < 0)) {
      return nullptr;
    }
  }
  return found.release();
}

// fetching(joint, records, accounts): records that are on disk begin to be read by `joint`, all at once.
PyObject* fetching(PyObject*, PyObject* arguments) {
  PyObject *joint, *records, *accounts;
  if (!PyArg_ParseTuple(arguments, "OO!O:fetching", &joint, &PyList_Type, &records, &accounts) || !only_records(records)) {
    return nullptr;
  }
  if (reinterpret_cast<PyObject*>(Py_TYPE(joint)) != fields.joint) {
    return PyErr_Format(PyExc_TypeError, "joint: a Joint");
  }
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(records); ++place) {
    PyObject* const record = PyList_GET_ITEM(records, place);
    if (!fields.state.is(record, known.spilled)) {
      return PyErr_Format(PyExc_RuntimeError, "%R -> fetching is not a legal transition", fields.state(record));
    }
  }
  const Ref notes(PyObject_GetAttr(accounts, name_notes));
  if (!notes || (PyObject_Size(notes.get()) != 0 && !Ref(settle(nullptr, accounts)))) {
    return nullptr;
  }
  long long came = 0;
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(records); ++place) {
    PyObject* const record = PyList_GET_ITEM(records, place);
    long long nbytes = 0;
    if (!fields.nbytes.read(record, &nbytes) || PyDict_SetItem(fields.joint_records(joint), record, Py_None) < 0 ||
        !fields.joint_nbytes.add(joint, nbytes)) {
      return nullptr;
    }
    fields.transfer.set(record, joint);
    fields.state.set(record, known.fetching);
    if (fields.counted.is(record, Py_False)) {
      fields.counted.set(record, Py_True);
      came += nbytes;
    }
  }
  return count_come(accounts, came) ? Py_NewRef(Py_None) : nullptr;
}

}  // namespace
