// Being inside of an offloader with its lock held, for what takes more than a moment under the GIL: Python may run
// meanwhile, finalizers only note what they want, and other threads wait.

#pragma once

#include "lane.hpp"
#include "moving.hpp"
#include "notes.hpp"

namespace {

// Holds an offloader's lock for as long as it lives.
class Inside {
 public:
  explicit Inside(const Lane* lane) : lock_(Py_NewRef(lane->lock)), in_(Ref(lock_enter(lock_.get(), nullptr))) {}
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
  ~Inside() { leave(); }
  explicit operator bool() const { return in_; }
  // Gives the lock back; what was noted meanwhile is worked off. False: an error came. One that was set before stays,
  // unless another comes, as where a `with` ends.
  bool leave() {
    if (!std::exchange(in_, false)) {
      return true;
    }
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (Ref(lock_release(lock_.get(), nullptr))) {
      PyErr_Restore(type, value, trace);
      return true;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return false;
  }

 private:
  const Ref lock_;
  bool in_;
};

// What every occasion is used for: `Storer._drain` and `Mover.notice_resized`, for the CPU.
bool look_around(const Lane* lane, PyObject* owner) {
  const Answer quiet = PyObject_Size(lane->dropped) == 0 ? nothing_recomputed(lane) : Answer::no;
  if (quiet == Answer::failed) {
    return false;
  }
  if (quiet == Answer::no) {
    if (!Ref(PyObject_CallMethodNoArgs(owner, name_drain))) {
      return false;
    }
  } else if (PyObject_Size(lane->notes) != 0 && !Ref(settle(nullptr, lane->accounts))) {
    return false;
  }
  PyObject* const watched = watched_on(lane, name_cpu);
  return watched == nullptr || look_in_turn(PyTuple_GET_ITEM(watched, 0), known.look_at, known.moving);
}

// `Accounts.came` and `Accounts.left`, after what was noted has been worked off.
bool count_come(PyObject* accounts, long long nbytes) {
  long long held = 0;
  return counts.resident_bytes.read(accounts, &held) &&
         (nbytes <= 0 || (counts.resident_peak_bytes.raise(accounts, held + nbytes) &&
                          counts.step_peak_bytes.raise(accounts, held + nbytes))) &&
         counts.resident_bytes.write(accounts, held + nbytes);  // last: after an error nothing is counted
}

bool came(const Lane* lane, long long nbytes) {
  return (PyObject_Size(lane->notes) == 0 || Ref(settle(nullptr, lane->accounts))) && count_come(lane->accounts, nbytes);
}

// `Accounts.born`, after what was noted has been worked off. After an error nothing is counted.
bool born(const Lane* lane, long long nbytes) {
  PyObject* const accounts = lane->accounts;
  long long live = 0, held = 0;
  if (!counts.live_records.read(accounts, &live) || !counts.baseline_bytes.read(accounts, &held)) {
    return false;
  }
  Ref lives(PyLong_FromLongLong(live + 1)), holds(PyLong_FromLongLong(held + nbytes));
  return lives && holds && counts.baseline_peak_bytes.raise(accounts, held + nbytes) &&
         counts.live_records.set(accounts, std::move(lives)) && counts.baseline_bytes.set(accounts, std::move(holds));
}

// `Accounts.died`.
bool died(const Lane* lane, long long nbytes) {
  return counts.live_records.add(lane->accounts, -1) &&
         (PyObject_Size(lane->notes) == 0 || Ref(settle(nullptr, lane->accounts))) &&
         counts.baseline_bytes.add(lane->accounts, -nbytes);
}

}  // namespace
