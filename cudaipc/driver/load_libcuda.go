//go:build cuda && !softcuda

package driver

// library returns the driver's, as the loader finds it. A program for users loads no other.
func library() string { return "libcuda.so.1" }
