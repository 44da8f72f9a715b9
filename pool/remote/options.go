package remote

import (
	"fmt"
	"time"
)

// Default sets an option that is zero to its default.
func Default[T comparable](v *T, d T) {
	var zero T
	if *v == zero {
		*v = d
	}
}

// Between returns nil for an option in its range, otherwise an error that names the store, the
// option and the range.
func Between[T int | int64 | time.Duration](store, name string, v, low, high T) error {
	if v < low || v > high {
		return fmt.Errorf("%s: %s is %v, allowed: %v to %v", store, name, v, low, high)
	}
	return nil
}
