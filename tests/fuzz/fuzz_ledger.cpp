// The compiled ledger in an interpreter of its own: tests/fuzz/ledger_life.py turns the input into
// steps of ledgers, and compares each with the plain-Python model.
//
// tests/fuzz/build links the modules written by Cython into the target, so that libFuzzer sees
// their branches and the sanitizers their memory. `heap.leave(n)` makes the n-th of the following
// requests for memory, and all later ones, fail, in base/pages.hpp and the standard library.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "base/pages.hpp"

extern "C" {
PyObject* PyInit_ledger();
PyObject* PyInit_verify();
PyObject* PyInit_scan();
}

void* operator new(size_t bytes) { return kvd::take_heap(bytes); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return kvd::try_heap(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

PyObject* run;

PyObject* leave(PyObject*, PyObject* count) {
  const uint64_t left = PyLong_AsUnsignedLongLong(count);
  if (PyErr_Occurred() != nullptr) return nullptr;
  kvd::heap_left = left;
  Py_RETURN_NONE;
}

PyMethodDef heap_calls[] = {{"leave", leave, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef heap_module = {
    PyModuleDef_HEAD_INIT, "heap", nullptr, -1, heap_calls, nullptr, nullptr, nullptr, nullptr};

PyObject* init_heap() { return PyModule_Create(&heap_module); }

void require(bool holds) {
  if (holds) return;
  PyErr_Print();
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  setenv("PYTHONMALLOC", "malloc", 1);  // lets the sanitizer see Python's objects, too
  PyImport_AppendInittab("heap", init_heap);
  PyImport_AppendInittab("kvd_core.json.scan", PyInit_scan);
  PyImport_AppendInittab("kvd_core.ledger.verify", PyInit_verify);
  PyImport_AppendInittab("kvd_core.ledger.ledger", PyInit_ledger);
  Py_InitializeEx(0);
  require(PyRun_SimpleString("import sys; sys.path.insert(0, '.')") == 0);
  PyObject* life = PyImport_ImportModule("tests.fuzz.ledger_life");
  require(life != nullptr);
  run = PyObject_GetAttrString(life, "run");
  require(run != nullptr);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  PyObject* done =
      PyObject_CallFunction(run, "y#", reinterpret_cast<const char*>(data), Py_ssize_t(size));
  require(done != nullptr);
  Py_DECREF(done);
  return 0;
}
