// Package driver is the CUDA driver as cudaipc uses it: gorgonia.org/cu, and the calls that cu
// lacks. It is the only package with foreign code for GPUs, and empty without the build tag cuda.
//
// The program does not depend on the driver's library: shim.c defines the library's symbols as
// jumps through a table, which Load fills from libcuda.so.1. Until then every call answers
// CUDA_ERROR_NOT_INITIALIZED, but cuInit, which answers success: cu calls it when it is imported
// and ends the process when it fails. stublib/libcuda.a is an empty archive: cu asks the linker for
// a library of that name.
//
// All calls but Load, GPUs and Version are for a thread that has entered a Context.
package driver
