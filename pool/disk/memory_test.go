package disk

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"
)

// TestMemory checks alignment and sizes, and that nothing stays mapped.
func TestMemory(t *testing.T) {
	before := mappedBytes(t)
	for _, n := range []int64{1, pageBytes, pageBytes + 1, hugeBytes - 1, hugeBytes, hugeBytes + 1, 5 << 20} {
		p, err := mapMemory(n)
		if err != nil {
			t.Fatal(err)
		}
		at, align := uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(pageBytes)
		if n >= hugeBytes {
			align = hugeBytes
		}
		if at%align != 0 || int64(len(p)) < n || int64(len(p)) >= n+int64(align) || len(p) != cap(p) {
			t.Errorf("%d bytes: %d of %d, %d past a multiple of %d", n, len(p), cap(p), at%align, align)
		}
		p[0], p[len(p)-1] = 1, 1
		if err := unmap(p); err != nil {
			t.Error(err)
		}
	}
	if after := mappedBytes(t); after-before >= hugeBytes {
		t.Errorf("%d bytes of address space are left", after-before)
	}
}

// mappedBytes returns the size of the process's anonymous mappings.
func mappedBytes(t *testing.T) (n int64) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		var from, to int64
		if f := strings.Fields(line); len(f) == 5 {
			if _, err := fmt.Sscanf(f[0], "%x-%x", &from, &to); err != nil {
				t.Fatal(err)
			}
			n += to - from
		}
	}
	return n
}

func TestReaderHasRoomForARun(t *testing.T) {
	for _, at := range []int64{0, 64, pageBytes - 64} {
		end := at + recordBytes(maxRun)
		if n := roundUp(end, pageBytes) - at/pageBytes*pageBytes; n > runMemory {
			t.Errorf("a block of %d bytes at %d is read with %d, and %d are there", maxRun, at, n, runMemory)
		}
	}
}
