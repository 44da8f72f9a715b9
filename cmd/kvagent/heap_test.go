package main

import (
	"runtime"
	"testing"
)

// With the floor, garbage of 512 MiB begins a few collections, and without it a hundred.
func TestHeapFloor(t *testing.T) {
	collections := func() uint32 {
		var before, after runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&before)
		for range 512 << 20 / (64 << 10) {
			garbage = make([]byte, 64<<10)
		}
		runtime.ReadMemStats(&after)
		return after.NumGC - before.NumGC
	}
	without := collections()
	floor := raiseHeap()
	with := collections()
	runtime.KeepAlive(floor)
	t.Logf("%d collections, %d with the floor", without, with)
	if with > 12 || without < 2*with {
		t.Errorf("%d collections without the floor, %d with it", without, with)
	}
}

var garbage []byte
