// What is done for each record of a row: as rows.py and row_tier.py do it, under the same names.

#pragma once

#include "inside.hpp"

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
  if (!address_of(data.get(), &now) || !fields.address.read(record, &then)) {
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
  if (!PyArg_ParseTuple(arguments, "OO!O:fetching", &joint, &PyList_Type, &records, &accounts) || !only_records(records) ||
      !is_accounts(accounts)) {
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
  if (PyObject_Size(counts.notes(accounts)) != 0 && !Ref(settle(nullptr, accounts))) {
    return nullptr;
  }
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
      if (!count_come(accounts, nbytes)) {
        return nullptr;
      }
      fields.counted.set(record, Py_True);
    }
  }
  Py_RETURN_NONE;
}

// How a record lies around the body that is written of it: a `Layout`.
struct Around {
  long long pad, io_begin, io_bytes;
};

bool layout_of(PyObject* record, Around* around) {
  PyObject* const layout = fields.io(record);
  if (reinterpret_cast<PyObject*>(Py_TYPE(layout)) != known.layout_class) {
    PyErr_SetString(PyExc_TypeError, "a record in a row has a Layout");
    return false;
  }
  around->pad = PyLong_AsLongLong(PyTuple_GET_ITEM(layout, 0));
  around->io_begin = PyLong_AsLongLong(PyTuple_GET_ITEM(layout, 3));
  around->io_bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(layout, 4));
  return PyErr_Occurred() == nullptr;
}

bool is_row(PyObject* row) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(row)) != fields.row || !PyList_Check(fields.row_records(row))) {
    PyErr_SetString(PyExc_TypeError, "row: a Row");
    return false;
  }
  return only_records(fields.row_records(row));
}

bool append_number(PyObject* list, long long number) {
  const Ref made(PyLong_FromLongLong(number));
  return made && PyList_Append(list, made.get()) == 0;
}

// lay_out(row, step): where each of its records begins.
PyObject* lay_out(PyObject*, PyObject* arguments) {
  PyObject* row;
  long long step = 0, end = 0, io_bytes = 0;
  if (!PyArg_ParseTuple(arguments, "OL:lay_out", &row, &step) || !is_row(row)) {
    return nullptr;
  }
  const Ref starts(PyList_New(0)), offsets(PyList_New(0)), records(Py_NewRef(fields.row_records(row)));
  if (!starts || !offsets || step < 1) {
    return PyErr_Occurred() != nullptr ? nullptr : PyErr_Format(PyExc_ValueError, "step=%lld: must be positive", step);
  }
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(records.get()); ++place) {
    PyObject* const record = PyList_GET_ITEM(records.get(), place);
    Around around;
    long long nbytes = 0;
    if (!layout_of(record, &around) || !fields.nbytes.read(record, &nbytes)) {
      return nullptr;
    }
    const long long start = (end + step - 1) / step * step + around.pad;
    if (!append_number(starts.get(), start) || !append_number(offsets.get(), io_bytes)) {
      return nullptr;
    }
    io_bytes += around.io_bytes;
    end = start + nbytes;
  }
  fields.row_starts.set(row, starts.get());
  fields.row_offsets.set(row, offsets.get());
  return fields.row_io_bytes.write(row, io_bytes) ? Py_NewRef(Py_None) : nullptr;
}

// board(row): its records have their room in it from now on. Returns each storage that is written with its address, and
// the memory of each body.
PyObject* board(PyObject*, PyObject* row) {
  if (!is_row(row)) {
    return nullptr;
  }
  const Ref places(PyList_New(0)), memory(PyList_New(0)), records(Py_NewRef(fields.row_records(row)));
  if (!places || !memory) {
    return nullptr;
  }
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(records.get()); ++place) {
    PyObject* const record = PyList_GET_ITEM(records.get(), place);
    Around around;
    long long address = 0, begin = 0;
    if (!layout_of(record, &around) || !fields.address.read(record, &address) || !fields.begin.read(record, &begin)) {
      return nullptr;
    }
    const Ref storage(Py_BuildValue("(OO)", fields.data(record), fields.address(record)));
    const Ref body(Py_BuildValue("(LL)", address + begin + around.io_begin, around.io_bytes));
    if (!storage || !body || PyList_Append(places.get(), storage.get()) < 0 || PyList_Append(memory.get(), body.get()) < 0) {
      return nullptr;
    }
  }
  for (Py_ssize_t place = 0; place < PyList_GET_SIZE(records.get()); ++place) {
    fields.extent.set(PyList_GET_ITEM(records.get(), place), row);
    if (!fields.row_users.add(row, 1)) {
      return nullptr;
    }
  }
  return Py_BuildValue("(OO)", places.get(), memory.get());
}

// wanted(row, record): the places of a record, and of all that come with it as they are on disk and asked for.
PyObject* wanted(PyObject*, PyObject* arguments) {
  PyObject *row, *record;
  if (!PyArg_ParseTuple(arguments, "OO:wanted", &row, &record) || !is_row(row)) {
    return nullptr;
  }
  PyObject* const records = fields.row_records(row);
  const bool apart = fields.row_apart.is(row, Py_True);
  Ref found(PyList_New(0));
  for (Py_ssize_t place = 0; found && place < PyList_GET_SIZE(records); ++place) {
    PyObject* const one = PyList_GET_ITEM(records, place);
    long long waiting = 0;
    if (!fields.waiting.read(one, &waiting)) {
      return nullptr;
    }
    const bool comes = one == record || (!apart && waiting > 0 && fields.state.is(one, known.spilled));
    if (comes && !append_number(found.get(), place)) {
      return nullptr;
    }
  }
  return found.release();
}

void let_go_of_slot(void* slot) {
  if (Py_IsInitialized() == 0) {
    return;
  }
  const PyGILState_STATE before = PyGILState_Ensure();
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  Py_DECREF(static_cast<PyObject*>(slot));  // notes its return
  PyErr_Restore(type, value, trace);
  PyGILState_Release(before);
}

// A storage in a slot's memory, which lives as long as that: that of `HostPool.tensor`, owning.
Ref storage_of_slot(PyObject* slot, long long address, long long nbytes) {
  Ref storage;
  guarded([&] {
    c10::DataPtr memory(reinterpret_cast<void*>(address), Py_NewRef(slot), let_go_of_slot, c10::Device(c10::kCPU));
    storage = wrap(c10::Storage(c10::Storage::use_byte_size_t(), static_cast<std::size_t>(nbytes), std::move(memory),
                                /*allocator=*/nullptr, /*resizable=*/false));
  });
  return storage;
}

// coming(row, places, slot, address): what is read into memory whose first byte would be the row's. Returns the memory
// of each body from the first of the places to the last, the records that come, and the storage and address of each.
PyObject* coming(PyObject*, PyObject* arguments) {
  PyObject *row, *wanted_places, *slot;
  long long address = 0;
  if (!PyArg_ParseTuple(arguments, "OO!OL:coming", &row, &PyList_Type, &wanted_places, &slot, &address) || !is_row(row)) {
    return nullptr;
  }
  const Ref records(Py_NewRef(fields.row_records(row))), starts(Py_NewRef(fields.row_starts(row)));
  const Ref memory(PyList_New(0)), who(PyList_New(0)), where(PyList_New(0));
  const Py_ssize_t count = PyList_GET_SIZE(wanted_places), size = PyList_GET_SIZE(records.get());
  if (!memory || !who || !where || count == 0 || !PyList_Check(starts.get()) || PyList_GET_SIZE(starts.get()) != size) {
    return PyErr_Occurred() != nullptr ? nullptr : PyErr_Format(PyExc_ValueError, "places: of records of the row");
  }
  Py_ssize_t next = 0;  // of those that are wanted
  for (Py_ssize_t place = PyLong_AsSsize_t(PyList_GET_ITEM(wanted_places, 0)); next < count; ++place) {
    if (place < 0 || place >= size) {
      return PyErr_Occurred() != nullptr ? nullptr : PyErr_Format(PyExc_IndexError, "the row has no record %zd", place);
    }
    PyObject* const record = PyList_GET_ITEM(records.get(), place);
    Around around;
    long long nbytes = 0;
    const long long start = address + PyLong_AsLongLong(PyList_GET_ITEM(starts.get(), place));
    if (!layout_of(record, &around) || !fields.nbytes.read(record, &nbytes)) {
      return nullptr;
    }
    const Ref body(Py_BuildValue("(LL)", start + around.io_begin, around.io_bytes));
    if (!body || PyList_Append(memory.get(), body.get()) < 0) {
      return nullptr;
    }
    const Py_ssize_t at = PyLong_AsSsize_t(PyList_GET_ITEM(wanted_places, next));
    if (at != place) {
      if (at < place) {
        return PyErr_Occurred() != nullptr ? nullptr : PyErr_Format(PyExc_ValueError, "places: in order");
      }
      continue;
    }
    ++next;
    const Ref storage = storage_of_slot(slot, start, nbytes);
    const Ref lies(storage ? Py_BuildValue("(OL)", storage.get(), start) : nullptr);
    if (!lies || PyList_Append(who.get(), record) < 0 || PyList_Append(where.get(), lies.get()) < 0) {
      return nullptr;
    }
  }
  return Py_BuildValue("(OOO)", memory.get(), who.get(), where.get());
}

}  // namespace
