// The end of a row's transfer for those of its records for which it ended as it should; the others are Python's.

#pragma once

#include <cstring>

#include "rows.hpp"

namespace {

bool is_joint(PyObject* joint) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(joint)) == fields.joint && PyDict_Check(fields.joint_records(joint))) {
    return true;
  }
  PyErr_SetString(PyExc_TypeError, "joint: a Joint");
  return false;
}

// `Joint.leave` of a record that is in it, and the end of its transfer.
bool leave_joint(PyObject* joint, PyObject* record, long long nbytes) {
  // What can fail comes first: who is still in it when all is over is Python's.
  if (!fields.joint_nbytes.add(joint, -nbytes) || PyDict_DelItem(fields.joint_records(joint), record) < 0) {
    return false;
  }
  fields.transfer.set(record, Py_None);
  return true;
}

// `CpuMover.write_done`; no: Python has to do it, and nothing was done. What it returns in `dropped` goes later.
Answer write_done(PyObject* joint, PyObject* record, PyObject* accounts, PyObject* dropped, long long* ended) {
  long long nbytes = 0, waiting = 0;
  if (!is_record(record) || !fields.state.is(record, known.spilling) || fields.data.nothing(record)) {
    return Answer::no;
  }
  const Answer elsewhere = resized(record);
  if (elsewhere != Answer::no) {
    return elsewhere == Answer::failed ? elsewhere : Answer::no;
  }
  if (!fields.nbytes.read(record, &nbytes) || !fields.waiting.read(record, &waiting) ||
      PyList_Append(dropped, fields.data(record)) < 0 || !leave_joint(joint, record, nbytes)) {
    return Answer::failed;
  }
  *ended += nbytes;
  fields.on_disk.set(record, Py_True);
  if (!fields.wanted.is(record, Py_False) && waiting != 0) {
    fields.state.set(record, known.resident);
    return Answer::yes;
  }
  fields.data.set(record, Py_None);
  fields.state.set(record, known.spilled);
  if (fields.counted.is(record, Py_True)) {
    fields.counted.set(record, Py_False);
    return count_come(accounts, -nbytes) ? Answer::yes : Answer::failed;
  }
  return Answer::yes;
}

// written(joint, core, accounts, dropped): a write has ended well. Whom it has ended for leaves the joint.
PyObject* written(PyObject*, PyObject* arguments) {
  PyObject *joint, *core, *accounts, *dropped;
  if (!PyArg_ParseTuple(arguments, "OOOO!:written", &joint, &core, &accounts, &PyList_Type, &dropped) ||
      !is_joint(joint) || !is_accounts(accounts)) {
    return nullptr;
  }
  if (PyObject_Size(counts.notes(accounts)) != 0 && !Ref(settle(nullptr, accounts))) {
    return nullptr;
  }
  const Ref records(PyDict_Keys(fields.joint_records(joint)));
  long long ended = 0;
  bool good = static_cast<bool>(records);
  for (Py_ssize_t place = 0; good && place < PyList_GET_SIZE(records.get()); ++place) {
    good = write_done(joint, PyList_GET_ITEM(records.get(), place), accounts, dropped, &ended) != Answer::failed;
  }
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  const bool counted = ended == 0 || add_to(core, name_pending_bytes, -ended);
  if (type != nullptr) {
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
  }
  return good && counted ? Py_NewRef(Py_None) : nullptr;
}

// The bytes before and after the body that was read: `CpuMover.read_done`.
bool put_edges(PyObject* record, long long start, long long nbytes) {
  Around around;
  if (!layout_of(record, &around)) {
    return false;
  }
  PyObject *const head = PyTuple_GET_ITEM(fields.io(record), 1), *const tail = PyTuple_GET_ITEM(fields.io(record), 2);
  if (!PyBytes_Check(head) || !PyBytes_Check(tail) ||
      PyBytes_GET_SIZE(head) + around.io_bytes + PyBytes_GET_SIZE(tail) != nbytes) {
    PyErr_SetString(PyExc_TypeError, "the edges of a record do not fit its body");
    return false;
  }
  char* const memory = reinterpret_cast<char*>(start);
  std::memcpy(memory, PyBytes_AS_STRING(head), static_cast<std::size_t>(PyBytes_GET_SIZE(head)));
  std::memcpy(memory + nbytes - PyBytes_GET_SIZE(tail), PyBytes_AS_STRING(tail), static_cast<std::size_t>(PyBytes_GET_SIZE(tail)));
  return true;
}

// `CpuMover.read_done` of a record whose bytes are in `storage` at `start`; no: Python has to do it.
Answer read_done(PyObject* joint, PyObject* record, PyObject* storage, long long start, bool apart) {
  long long nbytes = 0;
  const int in_it = PyDict_Contains(fields.joint_records(joint), record);
  if (in_it <= 0 || !fields.state.is(record, known.fetching) || fields.counted.is(record, Py_False)) {
    return in_it < 0 ? Answer::failed : Answer::no;
  }
  if (!fields.nbytes.read(record, &nbytes) || !put_edges(record, start, nbytes) || !leave_joint(joint, record, nbytes)) {
    return Answer::failed;
  }
  fields.data.set(record, storage);
  fields.data_begin.set(record, fields.begin(record));
  fields.state.set(record, known.resident);
  if (!apart) {
    fields.error.set(record, Py_None);
  }
  return Answer::yes;
}

// fetched(joint, records, places, apart): a read has ended well, and left what is of each record where `places` say.
PyObject* fetched(PyObject*, PyObject* arguments) {
  PyObject *joint, *records, *places;
  int apart = 0;
  if (!PyArg_ParseTuple(arguments, "OO!O!p:fetched", &joint, &PyList_Type, &records, &PyList_Type, &places, &apart) ||
      !is_joint(joint) || !only_records(records)) {
    return nullptr;
  }
  if (PyList_GET_SIZE(records) != PyList_GET_SIZE(places)) {
    return PyErr_Format(PyExc_ValueError, "places: one for each of %zd records", PyList_GET_SIZE(records));
  }
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(records); ++place) {
    const Ref lies(Py_NewRef(PyList_GET_ITEM(places, place)));
    PyObject* storage;
    long long start = 0;
    if (!PyTuple_Check(lies.get()) || !PyArg_ParseTuple(lies.get(), "OL:place", &storage, &start) ||
        read_done(joint, PyList_GET_ITEM(records, place), storage, start, apart != 0) == Answer::failed) {
      return PyErr_Occurred() != nullptr ? nullptr : PyErr_Format(PyExc_TypeError, "places: (storage, address) of each");
    }
  }
  Py_RETURN_NONE;
}

}  // namespace
