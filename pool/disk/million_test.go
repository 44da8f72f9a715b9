package disk

import (
	"encoding/binary"
	"os"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// TestRecoverAMillion prints how long a store of a million blocks takes to open, and the size of
// its index.
func TestRecoverAMillion(t *testing.T) {
	if os.Getenv("KVAGENT_LONG") == "" {
		t.Skip("SKIPPED: takes half a minute and 1.3 GB of disk: set KVAGENT_LONG=1")
	}
	const n, batch = 1_000_000, 4000
	o := Options{Dirs: []Dir{{t.TempDir(), 4 << 30}}, SegmentBytes: 64 << 20}
	s := open(t, o)
	items, data := make([]pool.Item, batch), make([]byte, 1000)
	for i := 0; i < n; i += batch {
		for k := range items {
			items[k] = pool.Item{
				Key: pool.Key{Hash: pool.MakeHash(binary.LittleEndian.AppendUint64(nil, uint64(i+k)))}, Data: data,
			}
		}
		put(t, s, items...)
	}
	closeNow(t, s)
	began := time.Now()
	s = open(t, o)
	took := time.Since(began)
	blocks, bytes := s.index.size()
	t.Logf("%d blocks recovered in %v, %d segments scanned, %.1f bytes of index each",
		blocks, took, s.count[scanned].Load(), float64(bytes)/float64(blocks))
	if blocks != n || s.count[scanned].Load() != 0 {
		t.Fatalf("%d blocks of %d are back, %d segments were scanned", blocks, n, s.count[scanned].Load())
	}
}
