//go:build cuda && softcuda

package driver

import "os"

// library returns the one that the environment names: tests run on a software double. Without a
// name it is the driver's.
func library() string {
	if path := os.Getenv("KVAGENT_LIBCUDA"); path != "" {
		return path
	}
	return "libcuda.so.1"
}
