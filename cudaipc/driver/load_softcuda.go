//go:build cuda && softcuda

package driver

import "os"

// library returns the library that the environment names, for tests on a software double, or else
// the driver's.
func library() string {
	if path := os.Getenv("KVAGENT_LIBCUDA"); path != "" {
		return path
	}
	return "libcuda.so.1"
}
