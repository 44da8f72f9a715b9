package proof

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// TestFailureEndsTheCheck expects a failure to end the check, what was opened to be closed, the
// last first, and the error to be told.
func TestFailureEndsTheCheck(t *testing.T) {
	var closed []string
	opened := func(b *bench, name string) { b.Cleanup(func() { closed = append(closed, name) }) }
	err := (&bench{}).run(func(b *bench) {
		opened(b, "outer")
		b.part(func() { opened(b, "part") })
		opened(b, "last")
		b.part(func() {
			opened(b, "failed part")
			b.Errorf("%d bytes", 7)
			b.Fatal("no ", "more")
		})
		t.Error("the check goes on")
	})
	if err == nil || !strings.Contains(err.Error(), "7 bytes") || !strings.Contains(err.Error(), "no more") {
		t.Errorf("error %v, want both", err)
	}
	if want := []string{"part", "failed part", "last", "outer"}; !slices.Equal(closed, want) {
		t.Errorf("closed %q, want %q", closed, want)
	}
	if err := (&bench{}).run(func(*bench) {}); err != nil {
		t.Errorf("error %v of a check that holds", err)
	}
}

// TestWrongBytes expects a byte that is wrong anywhere to be counted.
func TestWrongBytes(t *testing.T) {
	p := make([]byte, 4096)
	devicetest.Pattern(p, 3, 0)
	for _, at := range []int{0, 2048, 4095} {
		p[at]++
	}
	if n := wrong(p, 3); n != 3 {
		t.Errorf("%d bytes are wrong, want 3", n)
	}
	if n := wrong(p, 4); n < 4096*3/4 {
		t.Errorf("%d of 4096 bytes tell two seeds apart", n)
	}
}
