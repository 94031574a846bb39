// How far ahead of backward all is fetched already, so that Python need not look.

#pragma once

#include "lane.hpp"
#include "record.hpp"
#include "slots.hpp"

namespace {

bool on_cpu(PyObject* record) {
  PyObject* const kind = fields.kind(record);
  return kind != nullptr && PyUnicode_Check(kind) && PyUnicode_CompareWithASCIIString(kind, "cpu") == 0;
}

// `Prefetch._bring` of what is in memory or on its way there; no: Python has to do it. `made`: the bytes of memory.
Answer bring(const Lane* lane, PyObject* record, bool early, long long* made) {
  if (!lane->open || lane->bounded || lane->mover == Py_None || !is_record(record) || !on_cpu(record)) {
    return Answer::no;
  }
  *made = 0;
  if (fields.state.is(record, known.resident) && !fields.data.nothing(record)) {
    if (fields.stays.is(record, Py_False)) {
      fields.wanted.set(record, Py_True);
    }
    return Answer::yes;
  }
  if (early || !fields.state.is(record, known.fetching) || !fields.data.nothing(record)) {
    return Answer::no;
  }
  fields.wanted.set(record, Py_True);
  return fields.nbytes.read(record, made) ? Answer::yes : Answer::failed;
}

// Passes by what needs no fetching; whether that is all that there is to do now.
Answer all_fetched(const Lane* lane, Tape* tape) {
  Py_ssize_t index = 0;
  bool early = false;
  for (;; ++tape->frontier) {
    const Next next = tape_next(tape, &index, &early);
    if (next == Next::nothing) {
      return Answer::yes;
    }
    if (next == Next::passed) {
      continue;
    }
    const auto at = static_cast<std::size_t>(index);
    PyObject* const record = tape->rows->records[at];
    long long made = 0;
    const Answer brought = bring(lane, record, early, &made);
    if (brought == Answer::failed) {
      return Answer::failed;
    }
    if (brought == Answer::no) {
      if (!early) {
        return Answer::no;
      }
      const Ref data(PyObject_GetAttr(record, name_data));
      return !data ? Answer::failed : data.get() == Py_None ? Answer::yes : Answer::no;
    }
    tape->rows->ahead[at] = made;
    tape->ahead_bytes += made;
  }
}

// Whether nothing is left to fetch now: along this tape, and along the one whose backward comes next.
Answer nothing_to_fetch(const Lane* lane, Tape* tape) {
  const Answer all = all_fetched(lane, tape);
  long long changes = 0;
  if (all != Answer::yes || !tape->exhausted()) {
    return all;
  }
  return !changes_of(lane, &changes) ? Answer::failed : tape_idle(tape, changes) ? Answer::yes : Answer::no;
}

}  // namespace
