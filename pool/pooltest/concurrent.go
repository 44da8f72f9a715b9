package pooltest

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvagent/kvagent/pool"
)

const (
	manyWorkers = 8
	manyRounds  = 300
)

// testManyAtOnce runs savers, loaders, look-ups and resets on one full pool, and checks every byte
// that is read.
func testManyAtOnce(t *testing.T, open Open) {
	f := start(t, open, Options{Bytes: 256 << 10, SlabBytes: 16 << 10}, model("two", 1, 1000, 1500))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	var workers sync.WaitGroup
	errs := make(chan error, manyWorkers)
	for k := range manyWorkers {
		workers.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(k)))
			for range manyRounds {
				if err := f.round(r); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	workers.Wait()
	close(errs)
	for err := range errs {
		t.Fatal(err)
	}
	f.check()
	f.empty()
}

func (f *fixture) round(r *rand.Rand) error {
	h, shard := fork(r), uint8(r.IntN(2))
	n, refs, _ := f.Pin(f.space, 0, h, 1<<30, nil)
	defer f.Unpin(refs)
	if r.IntN(100) == 0 {
		if _, err := f.ResetSpace(f.space); err != nil {
			return err
		}
	}
	var parent []byte
	if n > 0 {
		parent = h.At(n - 1)
	}
	save := f.batch(h.Slice(n, h.N), shard, parent)
	f.Reserve(save)
	f.write(save)
	f.Commit(save.Slots, save.Epoch, save.Status)
	f.Prefix(f.space, 0, h)
	f.present(h)
	load := f.batch(h, shard, nil)
	f.Acquire(load)
	defer f.Release(load.Slots, load.Status)
	for i, s := range load.Status {
		if s != pool.OK {
			continue
		}
		key, slot := f.key(load, i), load.Slots[i]
		want := make([]byte, slot.Len)
		content(&key, want)
		if string(want) != string(f.arena[slot.Off:slot.Off+int64(slot.Len)]) {
			return fmt.Errorf("wrong bytes under hash %d of shard %d", i, shard)
		}
	}
	return nil
}
