// `Accounts.settle`: works off what was noted of tensors that stay.

#pragma once

#include "slots.hpp"

namespace {

constexpr long long kRecord = 2;  // RECORD of accounts.py; compared when the module is set up

// What `Accounts.settle` adds up.
struct Sums {
  long long records = 0, tensors = 0, packed = 0, now = 0, peak = 0;  // now and peak: bytes above what was held before
  PyObject* reason = nullptr;                            // of `reason_bytes`; borrowed from `held`
  long long reason_bytes = 0;
};

bool flush(PyObject* by_reason, Sums* sums) {
  if (sums->reason == nullptr) {
    return true;
  }
  const Ref reason(std::exchange(sums->reason, nullptr));
  PyObject* const before = PyDict_GetItemWithError(by_reason, reason.get());
  if (before == nullptr && PyErr_Occurred() != nullptr) {
    return false;
  }
  const long long known_bytes = before == nullptr ? 0 : PyLong_AsLongLong(before);
  const Ref sum(PyLong_FromLongLong(known_bytes + std::exchange(sums->reason_bytes, 0)));
  return sum && PyDict_SetItem(by_reason, reason.get(), sum.get()) == 0;
}

// Counts one note; false, with an error, where it is none.
bool count(PyObject* by_reason, PyObject* one, Sums* sums) {
  if (PyLong_Check(one)) {
    const long long nbytes = PyLong_AsLongLong(one);
    sums->records -= nbytes < 0;
    sums->now -= nbytes < 0 ? -nbytes : nbytes;
    return PyErr_Occurred() == nullptr;
  }
  if (!PyTuple_Check(one) || PyTuple_GET_SIZE(one) != 3) {
    PyErr_SetString(PyExc_ValueError, "not enough values in a note");
    return false;
  }
  PyObject* const reason = PyTuple_GET_ITEM(one, 0);
  const long long nbytes = PyLong_AsLongLong(PyTuple_GET_ITEM(one, 1)), kind = PyLong_AsLongLong(PyTuple_GET_ITEM(one, 2));
  if (PyErr_Occurred() != nullptr || (sums->reason != reason && !flush(by_reason, sums))) {
    return false;
  }
  if (sums->reason == nullptr) {
    sums->reason = Py_NewRef(reason);
  }
  sums->reason_bytes += nbytes;
  ++sums->tensors;
  sums->packed += nbytes;
  sums->records += kind == kRecord;
  if (kind > 0) {
    sums->now += nbytes;
    sums->peak = sums->now > sums->peak ? sums->now : sums->peak;
  }
  return true;
}

bool enter(PyObject* accounts, const Sums& sums) {
  long long saved = 0, held = 0;
  return counts.baseline_bytes.read(accounts, &saved) && counts.resident_bytes.read(accounts, &held) &&
         counts.packed_tensors.add(accounts, sums.tensors) && counts.packed_bytes.add(accounts, sums.packed) &&
         counts.live_records.add(accounts, sums.records) && counts.baseline_bytes.write(accounts, saved + sums.now) &&
         counts.resident_bytes.write(accounts, held + sums.now) &&
         counts.baseline_peak_bytes.raise(accounts, saved + sums.peak) &&
         counts.resident_peak_bytes.raise(accounts, held + sums.peak) &&
         counts.step_peak_bytes.raise(accounts, held + sums.peak);
}

// `Accounts.settle`: works off what was noted. What is taken off the notes is counted, whatever comes.
PyObject* settle(PyObject*, PyObject* accounts) {
  if (!is_accounts(accounts)) {
    return nullptr;
  }
  const Ref notes(Py_NewRef(counts.notes(accounts))), by_reason(Py_NewRef(counts.kept_bytes(accounts)));
  if (!PyDict_Check(by_reason.get())) {
    PyErr_SetString(PyExc_TypeError, "kept_bytes is no dictionary");
    return nullptr;
  }
  Sums sums;
  bool good = true;
  while (good && PyObject_Size(notes.get()) > 0) {
    const Ref first(PySequence_GetItem(notes.get(), 0));
    good = first && count(by_reason.get(), first.get(), &sums);
    if (good) {
      good = static_cast<bool>(known.popleft(notes.get()));
    }
  }
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  const bool entered = flush(by_reason.get(), &sums) && enter(accounts, sums);
  if (type != nullptr) {
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
    return nullptr;
  }
  return entered ? Py_NewRef(Py_None) : nullptr;
}

}  // namespace
