// The hooks in C, without a frame of Python where a tensor stays, and the parts of the offloader that they need: the module.
//
// Only Python's C interface is used, and of PyTorch only what it offers to Python, so nothing here depends on PyTorch's
// binary interface. All of it runs under the GIL, and nothing between taking a note and handing out the handle that owns it
// can be interrupted.

#include <tuple>

#include "copy.hpp"
#include "pack.hpp"
#include "piece.hpp"
#include "row_ends.hpp"
#include "tape_type.hpp"

namespace {

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
  const Ref alive(Py_NewRef(handle));  // Python runs meanwhile, and may let the graph go
  if (Py_TYPE(handle) == &kept_type) {
    return kept_unpack(handle, nullptr);
  }
  if (Py_TYPE(handle) == &moved_type) {
    return moved_unpack(handle, nullptr);
  }
  return Py_TYPE(handle) == &stayed_type ? stayed_unpack(handle, nullptr) : PyObject_CallOneArg(known.unpack, handle);
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

// What `setup` is told under a name: an object, or a number.
struct Told {
  const char* name;
  PyObject** object;
  long long* number;
};

// Reads what was told; false, with an error, where something is missing, or more was said.
template <std::size_t Count>
bool read_told(const Told (&told)[Count], PyObject* names) {
  for (const Told& one : told) {
    PyObject* const found = names == nullptr ? nullptr : PyDict_GetItemString(names, one.name);
    if (found == nullptr) {
      PyErr_Format(PyExc_TypeError, "setup() was not told %s", one.name);
      return false;
    }
    if (one.object != nullptr) {
      *one.object = found;
      continue;
    }
    *one.number = PyLong_AsLongLong(found);
    if (*one.number == -1 && PyErr_Occurred() != nullptr) {
      return false;
    }
  }
  if (PyDict_GET_SIZE(names) != static_cast<Py_ssize_t>(Count)) {
    PyErr_Format(PyExc_TypeError, "setup() takes %zu names, and was told %zd", Count, PyDict_GET_SIZE(names));
    return false;
  }
  return true;
}

bool find_all(Known* given, PyObject* base, PyObject* deque) {
  const std::pair<Getter*, const char*> getters[] = {
      {&given->base, "_base"}, {&given->device, "device"}, {&given->dtype, "dtype"}, {&given->shape, "shape"}};
  const std::tuple<Method*, PyObject*, const char*> methods[] = {
      {&given->detach, base, "detach"}, {&given->append, deque, "append"}, {&given->popleft, deque, "popleft"}};
  for (const auto& [getter, name] : getters) {
    if (!getter->find(base, name)) {
      return false;
    }
  }
  for (const auto& [method, type, name] : methods) {
    if (!method->find(type, name)) {
      return false;
    }
  }
  return true;
}

PyObject* setup(PyObject*, PyObject*, PyObject* names) {
  PyObject *base, *samples;
  Known given = known;
  Fields classes = fields;
  Counts running = counts;
  long long many = 0, record = 0, look_at = 0;
  const Told told[] = {
      {"base", &base, nullptr}, {"samples", &samples, nullptr}, {"storage", &given.storage, nullptr},
      {"tensor", &given.tensor, nullptr}, {"parameter", &given.parameter, nullptr}, {"regions", &given.regions, nullptr},
      {"check_version", &given.check_version, nullptr}, {"unpack", &given.unpack, nullptr},
      {"static", &given.static_name, nullptr}, {"small", &given.small_name, nullptr},
      {"resident", &given.resident, nullptr}, {"released", &given.released, nullptr},
      {"spilling", &given.spilling, nullptr}, {"spilled", &given.spilled, nullptr}, {"fetching", &given.fetching, nullptr},
      {"moving", &given.moving, nullptr}, {"make_lock", &given.make_lock, nullptr}, {"make_deque", &given.make_deque, nullptr},
      {"replaced", &given.replaced, nullptr}, {"view_in", &given.view_in, nullptr},
      {"own_counter", &given.own_counter, nullptr}, {"layout", &given.layout_class, nullptr},
      {"stayed", &given.stayed, nullptr}, {"row_mover", &given.row_mover, nullptr}, {"numbers", &given.numbers, nullptr},
      {"empty", &given.empty, nullptr}, {"float32", &given.float32, nullptr}, {"cpu", &given.cpu, nullptr},
      {"from_weak_ref", &given.weak_ref_lock, nullptr}, {"record_class", &classes.record, nullptr},
      {"joint_class", &classes.joint, nullptr}, {"row_class", &classes.row, nullptr}, {"phases_class", &classes.phases, nullptr},
      {"accounts_class", &running.accounts, nullptr},
      {"many", nullptr, &many}, {"record", nullptr, &record}, {"span_alignment", nullptr, &given.span_alignment},
      {"look_at", nullptr, &look_at}, {"bounce_bytes", nullptr, &given.bounce_bytes},
      {"small_bytes", nullptr, &given.small_bytes}, {"min_alignment", nullptr, &given.min_alignment}};
  if (!read_told(told, names)) {
    return nullptr;
  }
  if (!PyList_Check(given.regions) || !PyTuple_Check(given.moving)) {
    PyErr_SetString(PyExc_TypeError, "regions is a list, moving a tuple");
    return nullptr;
  }
  if (many != kMany || record != kRecord) {
    PyErr_SetString(PyExc_ValueError, "a burst or a note is not what it was");
    return nullptr;
  }
  if (!PyType_Check(base) || !PyType_Check(given.storage)) {
    PyErr_SetString(PyExc_TypeError, "base and storage are types");
    return nullptr;
  }
  if (!find_tensors(samples, reinterpret_cast<PyTypeObject*>(base), reinterpret_cast<PyTypeObject*>(given.storage)) ||
      !find_all(&given, base, given.make_deque) || !classes.find() || !running.find()) {
    return nullptr;
  }
  given.look_at = static_cast<Py_ssize_t>(look_at);
  Py_INCREF(names);  // and with it all that was told, for as long as the process lives
  known = given;
  fields = classes;
  counts = running;
  return Py_NewRef(Py_None);
}

PyMethodDef functions[] = {
    {"setup", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(setup)), METH_VARARGS | METH_KEYWORDS,
     "Tell the module what PyTorch and this library look like. Once, before all else."},
    {"settle", settle, METH_O, "Work off the notes of an `Accounts`."},
    {"notice_resized", notice_resized, METH_VARARGS, "notice_resized(turn, most, moving): look at what is being copied."},
    {"copy", copy, METH_O, "copy(parts): for each (to, from), without Python's lock."},
    {"resized", all_resized, METH_O, "resized(records): those whose owner has freed or resized them."},
    {"lay_out", lay_out, METH_VARARGS, "lay_out(row, step): where each of its records begins."},
    {"board", board, METH_O, "board(row): its records have room in it; (storages with addresses, memory of bodies)."},
    {"wanted", wanted, METH_VARARGS, "wanted(row, record): the places of what is read with a record."},
    {"coming", coming, METH_VARARGS, "coming(row, places, slot, address): (memory of bodies, records, where they lie)."},
    {"written", written, METH_VARARGS, "written(joint, core, accounts, dropped): for those for whom it has, as it should."},
    {"fetched", fetched, METH_VARARGS, "fetched(joint, records, places, apart): likewise."},
    {"fetching", fetching, METH_VARARGS, "fetching(joint, records, accounts): all begin to be read by it."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "actoffload_hooks", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

void describe_types() {
  describe_kept();
  describe_entry();
  describe(&unpack_type, "actoffload_hooks.Unpack", sizeof(Unpack), Py_TPFLAGS_DISALLOW_INSTANTIATION, unpack_getters,
           "The tensor that a handle stands for.");
  make_callable(&unpack_type, offsetof(Unpack, vectorcall));
  describe_lock();
  describe_tape();
  describe_lane();
  describe_record();
  describe_stayed();
  describe_reference();
  describe_moved();
  describe_piece();
  describe_pack();
}

}  // namespace

PyMODINIT_FUNC PyInit_actoffload_hooks() {
  describe_types();
  PyTypeObject* const types[] = {&kept_type, &pack_type, &lock_type, &tape_type, &lane_type, &record_type, &stayed_type,
                                 &reference_type, &moved_type, &entry_type, &piece_type, &unpack_type};
  if (!intern_names()) {
    return nullptr;
  }
  Ref made(PyModule_Create(&module));
  for (PyTypeObject* const type : types) {
    if (!made || PyType_Ready(type) < 0 ||
        (type != &unpack_type && PyModule_AddType(made.get(), type) < 0)) {
      return nullptr;
    }
  }
  Ref unpack(make_unpack());
  if (!unpack || PyModule_AddObjectRef(made.get(), "unpack", unpack.get()) < 0) {
    return nullptr;
  }
  return made.release();
}
