// Package driver is the CUDA driver for cudaipc: gorgonia.org/cu, and the calls that cu lacks. It
// is the only package with foreign code for GPUs, and empty without the build tag cuda.
//
// The program is not linked with the driver's library: shim.c defines the library's symbols as
// jumps through a table, which Load fills from libcuda.so.1. Before that every call answers
// CUDA_ERROR_NOT_INITIALIZED, but cuInit answers success, because cu calls it when it is imported
// and ends the process if it fails. stublib/libcuda.a is an empty archive, since cu asks the
// linker for a library of that name.
//
// All calls but Load, GPUs and Version need a thread that has entered a Context.
package driver
