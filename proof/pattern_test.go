package proof

import "testing"

// A byte that is wrong anywhere is counted; other seeds and other places have other bytes.
func TestPattern(t *testing.T) {
	a, b := make([]byte, 4096), make([]byte, 4096)
	pattern(a, 1)
	pattern(b, 2)
	if n := wrong(a, 1); n != 0 {
		t.Errorf("%d bytes of a pattern are not its own", n)
	}
	if n := wrong(b, 1); n < 4096*9/10 {
		t.Errorf("%d of 4096 bytes tell two seeds apart", n)
	}
	copy(b, a[8:])
	if n := wrong(b, 1); n < 4096*9/10 {
		t.Errorf("%d of 4096 bytes tell two places apart", n)
	}
	for _, at := range []int{0, 7, 2048, 4095} {
		a[at]++
		if n := wrong(a, 1); n != 1 {
			t.Errorf("byte %d is wrong, %d are counted", at, n)
		}
		a[at]--
	}
	if n := words([]byte{1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1}, 1); n != 2 {
		t.Errorf("%d words are 1, want 2", n)
	}
}
