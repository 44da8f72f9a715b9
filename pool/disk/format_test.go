package disk

import (
	"bytes"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

func TestCopySum(t *testing.T) {
	for _, n := range []int{0, 1, copyStep - 1, copyStep, copyStep + 1, 3*copyStep + 7} {
		src, dst := noise[:n], make([]byte, n)
		if got, want := copySum(7, dst, src), pool.Sum(7, src); got != want || !bytes.Equal(dst, src) {
			t.Errorf("%d bytes: checksum %08x, want %08x; copied: %v", n, got, want, bytes.Equal(dst, src))
		}
	}
}
