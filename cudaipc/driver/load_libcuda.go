//go:build cuda && !softcuda

package driver

// library returns the driver's name for the loader. A program for users loads no other.
func library() string { return "libcuda.so.1" }
