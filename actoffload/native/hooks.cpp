// The beginning of pack, and both ends of what stays: `hooks.py` and `handles.py` in C, without a Python frame.
//
// Most of what autograd saves is a parameter or a small tensor and stays where it is. For those `Pack` does all that
// `Offloader._pack` does; for what may move it finds storage and span and calls `Offloader._save`; and for whatever is
// out of the ordinary it calls `Offloader._pack` itself. Only Python's C interface is used, and of PyTorch only what it
// offers to Python, so nothing here depends on PyTorch's binary interface. All of it runs under the GIL, and nothing
// between taking a note and handing out the handle that owns it can be interrupted.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
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
  ~Ref() { Py_XDECREF(object_); }
  explicit operator bool() const { return object_ != nullptr; }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_ = nullptr;
};

// An attribute of every tensor that is written in C: read without looking it up.
class Getter {
 public:
  bool find(PyObject* base, const char* name) {
    Ref found(PyObject_GetAttrString(base, name));
    if (!found) {
      return false;
    }
    if (Py_TYPE(found.get()) != &PyGetSetDescr_Type) {
      PyErr_Format(PyExc_TypeError, "%s is not what it was", name);
      return false;
    }
    descriptor_ = reinterpret_cast<PyGetSetDescrObject*>(found.release());  // lives as long as the process
    return true;
  }
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

// What `setup` was told: PyTorch's types and functions, and ours.
struct Known {
  PyObject *tensor, *parameter, *strided, *regions, *task_id, *check_version, *unpack;  // regions: a list, of all threads'
  PyObject *static_name, *small_name;  // reasons
  long long span_alignment;            // SPAN_ALIGNMENT of identity.py
  Getter layout, is_nested, is_quantized, is_cpu, is_meta, base, requires_grad, is_leaf, nbytes, version, device, dtype, shape;
  Getter number;  // of a storage: its StorageImpl's address
} known;

PyObject *name_untyped_storage, *name_nbytes, *name_is_contiguous, *name_storage_offset, *name_element_size,
    *name_detach, *name_cpu, *name_type, *name_device_budget, *name_active, *name_append, *name_popleft;

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

enum class Answer { failed = -1, no = 0, yes = 1 };

Answer truth(const Ref& object) {
  if (!object) {
    return Answer::failed;
  }
  return object.get() == Py_True ? Answer::yes : object.get() == Py_False ? Answer::no : Answer::failed;
}

// -- what stays ------------------------------------------------------------------------------------------------------

struct Kept {
  PyObject_HEAD
  PyObject* alias;
  PyObject* version;
  PyObject* notes;  // where the death of an activation is noted; null for what is none
  PyObject* nbytes;
};

extern PyTypeObject kept_type;

// An alias that lies in a handle alone refers to nothing that the collector could free, and there may be 100,000 of
// them: it passes them by. Not what a mode returns in the place of an alias, which others have as well.
Ref hidden_alias(PyObject* tensor) {
  Ref alias = call(tensor, name_detach);
  if (alias && alias.get() != tensor && Py_REFCNT(alias.get()) == 1 &&
      reinterpret_cast<PyObject*>(Py_TYPE(alias.get())) == known.tensor && PyObject_GC_IsTracked(alias.get())) {
    PyObject_GC_UnTrack(alias.get());
  }
  return alias;
}

PyObject* make_kept(Ref alias) {
  if (!alias) {
    return nullptr;
  }
  Ref version = known.version(alias.get());
  if (!version) {
    return nullptr;
  }
  Kept* const kept = PyObject_New(Kept, &kept_type);
  if (kept != nullptr) {
    kept->alias = alias.release();
    kept->version = version.release();
    kept->notes = kept->nbytes = nullptr;
  }
  return reinterpret_cast<PyObject*>(kept);
}

void kept_dealloc(PyObject* self) {
  Kept* const kept = reinterpret_cast<Kept*>(self);
  if (kept->notes != nullptr) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Ref done(PyObject_CallMethodOneArg(kept->notes, name_append, kept->nbytes));
    if (!done) {
      PyErr_WriteUnraisable(kept->notes);  // not `self`, which would die a second time
    }
    PyErr_Restore(type, value, trace);
  }
  Py_XDECREF(kept->alias);
  Py_XDECREF(kept->version);
  Py_XDECREF(kept->notes);
  Py_XDECREF(kept->nbytes);
  PyObject_Free(self);
}

// The alias: seen by the collector again, as whoever has it may give it attributes.
PyObject* handed_out(Kept* kept) {
  if (!PyObject_GC_IsTracked(kept->alias)) {
    PyObject_GC_Track(kept->alias);
  }
  return Py_NewRef(kept->alias);
}

PyObject* kept_unpack(PyObject* self, PyObject*) {
  Kept* const kept = reinterpret_cast<Kept*>(self);
  Ref now = known.version(kept->alias);
  long long is = 0, was = 0;
  if (!now || !integer(now, &is)) {
    return nullptr;
  }
  was = PyLong_AsLongLong(kept->version);
  if (is != was) {
    Ref dtype = known.dtype(kept->alias);
    Ref shape(dtype ? known.shape(kept->alias) : Ref());
    if (!shape) {
      return nullptr;
    }
    PyObject* const arguments[] = {now.get(), kept->version, dtype.get(), shape.get(), Py_None};
    Ref checked(PyObject_Vectorcall(known.check_version, arguments, 5, nullptr));
    if (!checked) {
      return nullptr;
    }
  }
  return handed_out(kept);
}

PyObject* kept_alias(PyObject* self, void*) { return handed_out(reinterpret_cast<Kept*>(self)); }

PyObject* kept_version(PyObject* self, void*) { return Py_NewRef(reinterpret_cast<Kept*>(self)->version); }

PyMethodDef kept_methods[] = {
    {"unpack", kept_unpack, METH_NOARGS, "The saved tensor; raises SavedTensorModifiedError if it was changed."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef kept_getters[] = {{"alias", kept_alias, nullptr, "Shares memory and version counter.", nullptr},
                              {"version", kept_version, nullptr, "At which it was saved.", nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject kept_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// -- pack ------------------------------------------------------------------------------------------------------------

struct Pack {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* owner;      // the Offloader
  PyObject* notes;      // Accounts.notes
  PyObject* by_number;  // of the storages that are known: parameters, buffers, inputs
  PyObject* marked;     // those with keep()
  PyObject* awaited;    // modules with sharded parameters that were never seen gathered
  PyObject* least;      // bytes by type of device
  PyObject* core;
  PyObject* recorder;
  PyObject* full;    // Offloader._pack
  PyObject* save;    // Offloader._save
  PyObject* settle;  // works the notes off
  PyObject* last;    // the note that was taken last: tensors of one size share it
  long long last_nbytes;
  Py_ssize_t many;
};

constexpr std::size_t kMembers[] = {
    offsetof(Pack, owner),    offsetof(Pack, notes), offsetof(Pack, by_number), offsetof(Pack, marked),
    offsetof(Pack, awaited),  offsetof(Pack, least), offsetof(Pack, core),      offsetof(Pack, recorder),
    offsetof(Pack, full),     offsetof(Pack, save),  offsetof(Pack, settle),    offsetof(Pack, last)};

PyObject** member(Pack* pack, std::size_t offset) {
  return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(pack) + offset);
}

// What is known of a tensor before anything is decided.
struct Facts {
  long long nbytes = 0, storage_bytes = 0;
  bool cpu = false, leaf = false, parameter = false;
};

// Whether a tensor is of the ordinary kind, for which alone the rest is written.
Answer ordinary(PyObject* tensor, Facts* facts) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  if (type != known.tensor && type != known.parameter) {
    return Answer::no;
  }
  const Ref layout = known.layout(tensor);
  if (!layout) {
    return Answer::failed;
  }
  if (layout.get() != known.strided) {
    return Answer::no;
  }
  for (const Getter* getter : {&known.is_nested, &known.is_quantized}) {
    const Answer odd = truth((*getter)(tensor));
    if (odd != Answer::no) {
      return odd == Answer::failed ? odd : Answer::no;
    }
  }
  const Answer cpu = truth(known.is_cpu(tensor));
  if (cpu != Answer::no) {
    facts->cpu = true;
    return cpu;
  }
  const Answer meta = truth(known.is_meta(tensor));
  return meta == Answer::failed ? meta : meta == Answer::yes ? Answer::no : Answer::yes;
}

// `is_parameter` of identity.py; no where its base is of another type, failed with an error set or without.
Answer look(PyObject* tensor, Facts* facts) {
  const Ref base = known.base(tensor);
  const Answer wanted = base ? truth(known.requires_grad(tensor)) : Answer::failed;
  const Answer leaf = wanted != Answer::failed ? truth(known.is_leaf(tensor)) : Answer::failed;
  if (leaf == Answer::failed) {
    return Answer::failed;
  }
  facts->leaf = leaf == Answer::yes;
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  if (base.get() == Py_None) {
    facts->parameter = (wanted == Answer::yes && facts->leaf) || type == known.parameter;
    return Answer::yes;
  }
  PyObject* const base_type = reinterpret_cast<PyObject*>(Py_TYPE(base.get()));
  if (base_type != known.tensor && base_type != known.parameter) {
    return Answer::no;
  }
  const Answer base_leaf = truth(known.is_leaf(base.get()));
  const Answer base_wanted = base_leaf != Answer::failed ? truth(known.requires_grad(base.get())) : Answer::failed;
  if (base_wanted == Answer::failed) {
    return Answer::failed;
  }
  facts->parameter = base_type == known.parameter ||
                     (base_leaf == Answer::yes &&
                      (base_wanted == Answer::yes || (wanted == Answer::yes && facts->leaf)));
  return Answer::yes;
}

// Whether a dictionary has a key; a key that is a number runs no Python.
Answer has(PyObject* dictionary, PyObject* key) {
  const int found = PyDict_Contains(dictionary, key);
  return found < 0 ? Answer::failed : found != 0 ? Answer::yes : Answer::no;
}

// Whether something beyond parameters and sizes decides: a note, a mark, a region, a recomputation.
Answer special(const Pack* pack, PyObject* number) {
  if (PyDict_GET_SIZE(pack->awaited) != 0) {
    return Answer::yes;
  }
  for (PyObject* dictionary : {pack->by_number, pack->marked}) {
    const Answer found = has(dictionary, number);
    if (found != Answer::no) {
      return found;
    }
  }
  if (PyList_GET_SIZE(known.regions) != 0) {  // of any thread: Python looks whose
    return Answer::yes;
  }
  long long task = 0;
  if (!integer(Ref(PyObject_CallNoArgs(known.task_id)), &task)) {
    return Answer::failed;
  }
  return task != -1 ? Answer::yes : Answer::no;
}

// The bytes of the storage that a contiguous view stands for: `byte_span` of identity.py. No if it is not contiguous.
Answer span(PyObject* tensor, const Facts& facts, long long* begin, long long* end) {
  const Answer contiguous = truth(call(tensor, name_is_contiguous));
  if (contiguous != Answer::yes) {
    return contiguous;
  }
  *begin = 0;
  *end = facts.storage_bytes;
  if (facts.nbytes == facts.storage_bytes || 2 * facts.nbytes >= facts.storage_bytes) {
    return Answer::yes;
  }
  long long offset = 0, itemsize = 0;
  if (!integer(call(tensor, name_storage_offset), &offset) || !integer(call(tensor, name_element_size), &itemsize)) {
    return Answer::failed;
  }
  *begin = offset * itemsize;
  *end = *begin + facts.nbytes;
  *begin -= *begin % known.span_alignment;
  *end = (*end + known.span_alignment - 1) / known.span_alignment * known.span_alignment;
  if (*end > facts.storage_bytes) {
    *end = facts.storage_bytes;
  }
  return Answer::yes;
}

// The type of a tensor's device, such as "cpu".
Ref device_type(PyObject* tensor, const Facts& facts) {
  if (facts.cpu) {
    return Ref(Py_NewRef(name_cpu));
  }
  const Ref device = known.device(tensor);
  return Ref(device ? PyObject_GetAttr(device.get(), name_type) : nullptr);
}

// The smallest tensor that moves from a tensor's device; no if nothing moves from there.
Answer least(const Pack* pack, PyObject* tensor, const Facts& facts, long long* nbytes) {
  const Ref type = device_type(tensor, facts);
  if (!type) {
    return Answer::failed;
  }
  PyObject* const found = PyDict_GetItemWithError(pack->least, type.get());
  if (found == nullptr) {
    return PyErr_Occurred() != nullptr ? Answer::failed : Answer::no;
  }
  *nbytes = PyLong_AsLongLong(found);
  return *nbytes == -1 && PyErr_Occurred() != nullptr ? Answer::failed : Answer::yes;
}

// Takes a note; many of them are worked off at once.
bool note(Pack* pack, PyObject* taken) {
  const Ref done(PyObject_CallMethodOneArg(pack->notes, name_append, taken));
  return static_cast<bool>(done);
}

bool settle_many(Pack* pack) {
  const Py_ssize_t notes = PyObject_Size(pack->notes);
  if (notes < pack->many) {
    return notes >= 0;
  }
  const Ref done(PyObject_CallNoArgs(pack->settle));
  return static_cast<bool>(done);
}

PyObject* keep_parameter(Pack* pack, PyObject* tensor, const Facts& facts) {
  // A leaf itself, as autograd does: it makes no cycle, and its `.data` may be swapped.
  Ref kept(make_kept(facts.leaf ? Ref(Py_NewRef(tensor)) : hidden_alias(tensor)));
  if (!kept) {
    return nullptr;
  }
  const long long nbytes = facts.nbytes < facts.storage_bytes ? facts.nbytes : facts.storage_bytes;
  const Ref taken(Py_BuildValue("(OLO)", known.static_name, nbytes, Py_False));
  if (!taken || !note(pack, taken.get()) || !settle_many(pack)) {
    return nullptr;
  }
  return kept.release();
}

PyObject* keep_small(Pack* pack, PyObject* tensor, long long nbytes) {
  Ref kept(make_kept(hidden_alias(tensor)));
  if (!kept) {
    return nullptr;
  }
  if (pack->last == nullptr || pack->last_nbytes != nbytes) {
    PyObject* const taken = Py_BuildValue("(OLO)", known.small_name, nbytes, Py_True);
    if (taken == nullptr) {
      return nullptr;
    }
    Py_XSETREF(pack->last, taken);
    pack->last_nbytes = nbytes;
  }
  if (!note(pack, pack->last)) {
    return nullptr;
  }
  Kept* const activation = reinterpret_cast<Kept*>(kept.get());  // from here on its death is noted
  activation->nbytes = Py_NewRef(PyTuple_GET_ITEM(pack->last, 1));
  activation->notes = Py_NewRef(pack->notes);
  return settle_many(pack) ? kept.release() : nullptr;
}

// Whether an activation that stays is only counted: nothing is recorded, and no room has to be made.
Answer only_counted(const Pack* pack) {
  const Ref budget(PyObject_GetAttr(pack->core, name_device_budget));
  if (!budget) {
    return Answer::failed;
  }
  const Answer records = truth(Ref(PyObject_GetAttr(pack->recorder, name_active)));
  if (records == Answer::failed) {
    return Answer::failed;
  }
  return budget.get() == Py_None && records == Answer::no ? Answer::yes : Answer::no;
}

// The handle of a tensor of the ordinary kind; null without an error where Python has to look at it.
PyObject* pack_ordinary(Pack* pack, PyObject* tensor) {
  Facts facts;
  if (ordinary(tensor, &facts) != Answer::yes || look(tensor, &facts) != Answer::yes) {
    return nullptr;
  }
  const Ref storage = call(tensor, name_untyped_storage);
  if (!storage) {
    return nullptr;
  }
  const Ref number = known.number(storage.get());
  if (!number || !integer(known.nbytes(tensor), &facts.nbytes) ||
      !integer(call(storage.get(), name_nbytes), &facts.storage_bytes)) {
    return nullptr;
  }
  if (facts.parameter) {
    return has(pack->by_number, number.get()) == Answer::yes ? keep_parameter(pack, tensor, facts) : nullptr;
  }
  long long begin = 0, end = 0, smallest = 0;
  if (facts.nbytes == 0 || special(pack, number.get()) != Answer::no ||
      span(tensor, facts, &begin, &end) != Answer::yes || least(pack, tensor, facts, &smallest) != Answer::yes) {
    return nullptr;
  }
  if (end - begin < smallest) {
    return only_counted(pack) == Answer::yes ? keep_small(pack, tensor, end - begin) : nullptr;
  }
  const Ref first(PyLong_FromLongLong(begin)), last(PyLong_FromLongLong(end));
  if (!first || !last) {
    return nullptr;
  }
  PyObject* const arguments[] = {tensor, storage.get(), first.get(), last.get()};
  return PyObject_Vectorcall(pack->save, arguments, 4, nullptr);
}

PyObject* pack_vectorcall(PyObject* self, PyObject* const* arguments, std::size_t flags, PyObject* names) {
  if (PyVectorcall_NARGS(flags) != 1 || (names != nullptr && PyTuple_GET_SIZE(names) != 0)) {
    PyErr_SetString(PyExc_TypeError, "pack takes one tensor");
    return nullptr;
  }
  Pack* const pack = reinterpret_cast<Pack*>(self);
  if (pack->full == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the offloader of this hook is being collected");
    return nullptr;
  }
  PyObject* const packed = pack_ordinary(pack, arguments[0]);
  if (packed != nullptr || PyErr_Occurred() != nullptr) {
    return packed;
  }
  return PyObject_CallOneArg(pack->full, arguments[0]);
}

PyObject* pack_new(PyTypeObject* type, PyObject* arguments, PyObject* names) {
  static const char* const kNames[] = {"owner", "notes", "by_number", "marked", "awaited", "least",  "core",
                                       "recorder", "full", "save",    "settle", "many",  nullptr};
  Ref self(type->tp_alloc(type, 0));  // all members are null
  if (!self) {
    return nullptr;
  }
  Pack* const pack = reinterpret_cast<Pack*>(self.get());
  PyObject* given[11];
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "OOO!O!O!O!OOOOOn:Pack", const_cast<char**>(kNames), &given[0],
                                   &given[1], &PyDict_Type, &given[2], &PyDict_Type, &given[3], &PyDict_Type, &given[4],
                                   &PyDict_Type, &given[5], &given[6], &given[7], &given[8], &given[9], &given[10],
                                   &pack->many)) {
    return nullptr;
  }
  for (std::size_t i = 0; i < 11; ++i) {
    *member(pack, kMembers[i]) = Py_NewRef(given[i]);
  }
  pack->vectorcall = pack_vectorcall;
  return self.release();
}

int pack_traverse(PyObject* self, visitproc visit, void* arg) {
  for (const std::size_t offset : kMembers) {
    Py_VISIT(*member(reinterpret_cast<Pack*>(self), offset));
  }
  return 0;
}

int pack_clear(PyObject* self) {
  for (const std::size_t offset : kMembers) {
    Py_CLEAR(*member(reinterpret_cast<Pack*>(self), offset));
  }
  return 0;
}

void pack_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  pack_clear(self);
  Py_TYPE(self)->tp_free(self);
}

PyObject* pack_self(PyObject* self, void*) {
  PyObject* const owner = reinterpret_cast<Pack*>(self)->owner;
  return Py_NewRef(owner != nullptr ? owner : Py_None);
}

PyGetSetDef pack_getters[] = {{"__self__", pack_self, nullptr, "The offloader, as of a bound method.", nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject pack_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

// -- notes -----------------------------------------------------------------------------------------------------------

// What `Accounts.settle` adds up.
struct Sums {
  long long tensors = 0, packed = 0, now = 0, peak = 0;  // now and peak: bytes above what was held before
  PyObject* reason = nullptr;                            // of `reason_bytes`; borrowed from `held`
  long long reason_bytes = 0;
};

bool add_to(PyObject* object, const char* name, long long more) {
  long long value = 0;
  if (!integer(Ref(PyObject_GetAttrString(object, name)), &value)) {
    return false;
  }
  const Ref sum(PyLong_FromLongLong(value + more));
  return sum && PyObject_SetAttrString(object, name, sum.get()) == 0;
}

bool raise_to(PyObject* object, const char* name, long long peak) {
  long long value = 0;
  if (!integer(Ref(PyObject_GetAttrString(object, name)), &value)) {
    return false;
  }
  if (value >= peak) {
    return true;
  }
  const Ref higher(PyLong_FromLongLong(peak));
  return higher && PyObject_SetAttrString(object, name, higher.get()) == 0;
}

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
    sums->now -= nbytes;
    return PyErr_Occurred() == nullptr;
  }
  if (!PyTuple_Check(one) || PyTuple_GET_SIZE(one) != 3) {
    PyErr_SetString(PyExc_ValueError, "not enough values in a note");
    return false;
  }
  PyObject* const reason = PyTuple_GET_ITEM(one, 0);
  const long long nbytes = PyLong_AsLongLong(PyTuple_GET_ITEM(one, 1));
  if (PyErr_Occurred() != nullptr || (sums->reason != reason && !flush(by_reason, sums))) {
    return false;
  }
  if (sums->reason == nullptr) {
    sums->reason = Py_NewRef(reason);
  }
  sums->reason_bytes += nbytes;
  ++sums->tensors;
  sums->packed += nbytes;
  if (PyTuple_GET_ITEM(one, 2) == Py_True) {
    sums->now += nbytes;
    sums->peak = sums->now > sums->peak ? sums->now : sums->peak;
  }
  return true;
}

bool enter(PyObject* accounts, const Sums& sums) {
  long long saved = 0, held = 0;
  return integer(Ref(PyObject_GetAttrString(accounts, "baseline_bytes")), &saved) &&
         integer(Ref(PyObject_GetAttrString(accounts, "resident_bytes")), &held) &&
         add_to(accounts, "packed_tensors", sums.tensors) && add_to(accounts, "packed_bytes", sums.packed) &&
         add_to(accounts, "baseline_bytes", sums.now) && add_to(accounts, "resident_bytes", sums.now) &&
         raise_to(accounts, "baseline_peak_bytes", saved + sums.peak) &&
         raise_to(accounts, "resident_peak_bytes", held + sums.peak) &&
         raise_to(accounts, "step_peak_bytes", held + sums.peak);
}

// `Accounts.settle`: works off what was noted. What is taken off the notes is counted, whatever comes.
PyObject* settle(PyObject*, PyObject* accounts) {
  const Ref notes(PyObject_GetAttrString(accounts, "notes")), by_reason(PyObject_GetAttrString(accounts, "kept_bytes"));
  if (!notes || !by_reason) {
    return nullptr;
  }
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
      good = static_cast<bool>(call(notes.get(), name_popleft));
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

// -- the module ------------------------------------------------------------------------------------------------------

// The unpack hook: an object, as PyTorch's compiler looks for an attribute that a function in C cannot have.
struct Unpack {
  PyObject_HEAD
  vectorcallfunc vectorcall;
};

PyObject* unpack_vectorcall(PyObject*, PyObject* const* arguments, std::size_t flags, PyObject* names) {
  if (PyVectorcall_NARGS(flags) != 1 || (names != nullptr && PyTuple_GET_SIZE(names) != 0)) {
    PyErr_SetString(PyExc_TypeError, "unpack takes one handle");
    return nullptr;
  }
  PyObject* const handle = arguments[0];
  return Py_TYPE(handle) == &kept_type ? kept_unpack(handle, nullptr) : PyObject_CallOneArg(known.unpack, handle);
}

PyObject* unpack_untraced(PyObject*, void*) { return Py_NewRef(Py_True); }

PyGetSetDef unpack_getters[] = {
    {"_torchdynamo_disable", unpack_untraced, nullptr, "The compiler does not look into it.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyTypeObject unpack_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* make_unpack() {
  Unpack* const unpack = PyObject_New(Unpack, &unpack_type);
  if (unpack != nullptr) {
    unpack->vectorcall = unpack_vectorcall;
  }
  return reinterpret_cast<PyObject*>(unpack);
}

PyObject* setup(PyObject*, PyObject* arguments, PyObject* names) {
  static const char* const kNames[] = {"base", "storage",  "tensor", "parameter", "strided",    "regions", "task_id",
                                       "check_version", "unpack", "static", "small", "span_alignment", nullptr};
  PyObject *base, *storage, *static_name, *small_name;
  Known given = known;
  if (!PyArg_ParseTupleAndKeywords(arguments, names, "OOOOOO!OOOUUL:setup", const_cast<char**>(kNames), &base, &storage,
                                   &given.tensor, &given.parameter, &given.strided, &PyList_Type, &given.regions, &given.task_id,
                                   &given.check_version, &given.unpack, &static_name, &small_name,
                                   &given.span_alignment)) {
    return nullptr;
  }
  const std::pair<Getter*, const char*> getters[] = {
      {&given.layout, "layout"},         {&given.is_nested, "is_nested"}, {&given.is_quantized, "is_quantized"},
      {&given.is_cpu, "is_cpu"},         {&given.is_meta, "is_meta"},     {&given.base, "_base"},          {&given.requires_grad, "requires_grad"},
      {&given.is_leaf, "is_leaf"},       {&given.nbytes, "nbytes"},       {&given.version, "_version"},
      {&given.device, "device"},         {&given.dtype, "dtype"},         {&given.shape, "shape"}};
  for (const auto& [getter, name] : getters) {
    if (!getter->find(base, name)) {
      return nullptr;
    }
  }
  if (!given.number.find(storage, "_cdata")) {
    return nullptr;
  }
  given.static_name = static_name;
  given.small_name = small_name;
  for (PyObject* object : {given.tensor, given.parameter, given.strided, given.regions, given.task_id,
                           given.check_version, given.unpack, given.static_name, given.small_name}) {
    Py_INCREF(object);  // for as long as the process lives
  }
  known = given;
  return Py_NewRef(Py_None);
}

PyMethodDef functions[] = {
    {"setup", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(setup)), METH_VARARGS | METH_KEYWORDS,
     "Tell the module what PyTorch and this library look like. Once, before all else."},
    {"settle", settle, METH_O, "Work off the notes of an `Accounts`."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "actoffload_hooks", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

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

void describe_types() {
  describe(&kept_type, "actoffload_hooks.Kept", sizeof(Kept), Py_TPFLAGS_DISALLOW_INSTANTIATION, kept_getters,
           "A saved tensor that stays where it is: its alias, and the version at which it was saved.");
  kept_type.tp_dealloc = kept_dealloc;
  kept_type.tp_methods = kept_methods;
  describe(&pack_type, "actoffload_hooks.Pack", sizeof(Pack), Py_TPFLAGS_HAVE_GC, pack_getters,
           "The pack hook of one entry of an offloader's context.");
  make_callable(&pack_type, offsetof(Pack, vectorcall));
  pack_type.tp_new = pack_new;
  pack_type.tp_dealloc = pack_dealloc;
  pack_type.tp_traverse = pack_traverse;
  pack_type.tp_clear = pack_clear;
  pack_type.tp_free = PyObject_GC_Del;
  describe(&unpack_type, "actoffload_hooks.Unpack", sizeof(Unpack), Py_TPFLAGS_DISALLOW_INSTANTIATION, unpack_getters,
           "The tensor that a handle stands for.");
  make_callable(&unpack_type, offsetof(Unpack, vectorcall));
}

bool intern_names() {
  const std::pair<PyObject**, const char*> names[] = {
      {&name_untyped_storage, "untyped_storage"},
      {&name_nbytes, "nbytes"},                   {&name_is_contiguous, "is_contiguous"},
      {&name_storage_offset, "storage_offset"},   {&name_element_size, "element_size"},
      {&name_detach, "detach"},                   {&name_cpu, "cpu"},
      {&name_type, "type"},                       {&name_device_budget, "device_budget"},
      {&name_active, "active"},                   {&name_append, "append"},
      {&name_popleft, "popleft"}};
  for (const auto& [name, text] : names) {
    *name = PyUnicode_InternFromString(text);
    if (*name == nullptr) {
      return false;
    }
  }
  return true;
}

}  // namespace

PyMODINIT_FUNC PyInit_actoffload_hooks() {
  describe_types();
  if (!intern_names() || PyType_Ready(&kept_type) < 0 || PyType_Ready(&pack_type) < 0 ||
      PyType_Ready(&unpack_type) < 0) {
    return nullptr;
  }
  Ref made(PyModule_Create(&module));
  if (!made || PyModule_AddObjectRef(made.get(), "Kept", reinterpret_cast<PyObject*>(&kept_type)) < 0 ||
      PyModule_AddObjectRef(made.get(), "Pack", reinterpret_cast<PyObject*>(&pack_type)) < 0) {
    return nullptr;
  }
  Ref unpack(make_unpack());
  if (!unpack || PyModule_AddObjectRef(made.get(), "unpack", unpack.get()) < 0) {
    return nullptr;
  }
  return made.release();
}
