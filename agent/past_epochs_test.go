package agent

import (
	"encoding/binary"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

// However many spaces come and go, no epoch of one comes back, others begin at 1 as long as there is room, and what is kept is bounded.
func TestPastEpochs(t *testing.T) {
	var p pastEpochs
	name := func(i int) (fp pool.Fingerprint) {
		binary.LittleEndian.PutUint64(fp[:], uint64(i)+1)
		return fp
	}
	last := make(map[pool.Fingerprint]uint32)
	for i := range 3 * maxPastEpochs {
		fp := name(i % (maxPastEpochs + 100))
		first := p.next(fp)
		if first <= last[fp] {
			t.Fatalf("space %d: epoch %d, and there was %d before", i, first, last[fp])
		}
		last[fp] = first + uint32(i%7)
		p.add(fp, last[fp])
		if i == maxPastEpochs-1 && p.next(name(i+1)) != 1 {
			t.Errorf("a new space begins at epoch %d, want 1", p.next(name(i+1)))
		}
		if len(p.last) > maxPastEpochs {
			t.Fatalf("%d epochs are kept, allowed: %d", len(p.last), maxPastEpochs)
		}
	}
}
