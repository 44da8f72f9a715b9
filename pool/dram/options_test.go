package dram

import (
	"errors"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

func TestPoolOfATebibyteIsRefused(t *testing.T) {
	if _, err := Open(Options{Bytes: 1 << 40}); !errors.Is(err, pool.ErrTooLarge) {
		t.Errorf("a pool of 1 TiB on this machine: %v, want ErrTooLarge", err)
	}
}

func TestOptionsOutOfRange(t *testing.T) {
	for field, o := range map[string]Options{
		"Bytes is 0":           {},
		"Bytes is 65535":       {Bytes: MinBytes - 1},
		"Bytes is 21990232555": {Bytes: MaxBytes + 1},
	} {
		if _, err := Open(o); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%v, want an error with %q", err, field)
		}
	}
	for bytes, slab := range map[int64]int64{
		64 << 10: 64 << 10, 32 << 20: 1 << 20, 64 << 20: 1 << 20, 128 << 20: 2 << 20, 1 << 30: 16 << 20,
		4 << 30: 64 << 20, 2 << 40: 64 << 20,
	} {
		if got := slabFor(bytes); got != slab {
			t.Errorf("slabs of a pool of %d: %d, want %d", bytes, got, slab)
		}
	}
}
