package pooltest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// TestFaultyStore checks a store that fails at random, such as any store wrapped by package fault.
// Under a layer that compares checksums no wrong byte is returned as OK, every status is set, and
// no call outlives its context; afterwards a caller that retries can store and read every key. A
// store may delay, fail, flip, lose and hang, each rarely enough that a few tries succeed: at rates
// of up to 5 %.
//
// KVAGENT_SEED repeats the storm of a seed, as far as threads allow.
func TestFaultyStore(t *testing.T, open OpenStore) {
	seed := stormSeed(t)
	s := &storm{shelf: &shelf{t: t, spec: model("store", 2, 1000), wide: model("wide", 1, 1000, 1000)}}
	s.Store = open(t, s.spec, s.wide)
	for i := range stormKeys {
		it := s.item(i)
		s.all, s.sums = append(s.all, it), append(s.sums, pool.Sum(it.Key.Seed(1000), it.Data))
	}
	var workers sync.WaitGroup
	for k := range stormWorkers {
		workers.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(k)))
			for range stormSteps {
				s.step(r)
			}
		})
	}
	workers.Wait()
	for i := range stormKeys {
		Until(t, fmt.Sprintf("item %d can be stored and read", i), func() bool { return s.retry(i) })
	}
}

const (
	stormWorkers  = 4
	stormSteps    = 150 // batches of each worker
	stormKeys     = 40
	stormBatch    = 6                     // items of a batch, at most
	stormDeadline = 50 * time.Millisecond // of each call
	stormGrace    = 20 * time.Second      // that a call may take beyond its deadline on a busy machine
	retryDeadline = 300 * time.Millisecond
)

// storm is many workers on few keys; the content of a key follows from the key.
type storm struct {
	*shelf
	sums []uint32 // of the items, as memory keeps them
	all  []pool.Item
}

func stormSeed(t testing.TB) uint64 {
	seed := rand.Uint64()
	if text := os.Getenv("KVAGENT_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("KVAGENT_SEED: %v", err)
		}
	}
	t.Logf("KVAGENT_SEED=%d", seed)
	return seed
}

// step performs one batch of one worker.
func (s *storm) step(r *rand.Rand) {
	var which []int
	for range 1 + r.IntN(stormBatch) {
		which = append(which, r.IntN(stormKeys))
	}
	ctx, cancel := context.WithTimeout(s.t.Context(), stormDeadline)
	defer cancel()
	before := time.Now()
	switch r.IntN(8) {
	case 0, 1, 2:
		s.stormPut(ctx, which)
	case 3, 4, 5:
		s.stormGet(ctx, which)
	case 6:
		keys, status := s.keys(which)
		if err := s.Exists(ctx, keys, status); s.wholeAnswer(ctx, "exists", err) {
			s.known("exists", status, pool.OK, pool.Missing)
		}
	case 7:
		keys, _ := s.keys(which)
		s.wholeAnswer(ctx, "delete", s.Delete(ctx, keys))
	}
	if took := time.Since(before); took > stormDeadline+stormGrace {
		s.t.Errorf("a call took %v under a context of %v", took, stormDeadline)
	}
}

func (s *storm) keys(which []int) (keys []pool.Key, status []pool.Status) {
	for _, i := range which {
		keys, status = append(keys, s.all[i].Key), append(status, unset)
	}
	return keys, status
}

// retry stores an item and reads it back, and deletes what arrives wrong. It reports success.
func (s *storm) retry(i int) bool {
	ctx, cancel := context.WithTimeout(s.t.Context(), retryDeadline)
	defer cancel()
	put := []pool.Item{s.item(i)}
	if s.Put(ctx, put) != nil || put[0].Status != pool.OK && put[0].Status != pool.Exists {
		return false
	}
	got := Empty(put)
	if s.Get(ctx, got) != nil {
		return false
	}
	if got[0].Status == pool.OK && string(got[0].Data) == string(put[0].Data) {
		return true
	}
	_ = s.Delete(ctx, []pool.Key{put[0].Key}) // if it fails, the next try finds the same
	return false
}

func (s *storm) stormPut(ctx context.Context, which []int) {
	items := make([]pool.Item, len(which))
	for n, i := range which {
		items[n] = s.item(i)
		items[n].Status = unset
	}
	ok := s.wholeAnswer(ctx, "put", s.Put(ctx, items))
	for n := range items {
		if ok {
			s.known("put", []pool.Status{items[n].Status}, pool.OK, pool.Exists, pool.InProgress, pool.Busy)
		}
		if string(items[n].Data) != string(s.all[which[n]].Data) {
			s.t.Error("a put changed the caller's bytes")
		}
	}
}

func (s *storm) stormGet(ctx context.Context, which []int) {
	items := make([]pool.Item, len(which))
	for n, i := range which {
		items[n] = pool.Item{Key: s.all[i].Key, Data: make([]byte, 1000), Status: unset}
	}
	if !s.wholeAnswer(ctx, "get", s.Get(ctx, items)) {
		return
	}
	for n, i := range which {
		it := &items[n]
		s.known("get", []pool.Status{it.Status}, pool.OK, pool.Missing, pool.Corrupt, pool.Busy)
		sumFits := pool.Sum(it.Key.Seed(1000), it.Data) == s.sums[i]
		if it.Status == pool.OK && sumFits && string(it.Data) != string(s.all[i].Data) {
			s.t.Error("wrong bytes under a right checksum")
		}
	}
}

// wholeAnswer returns false if the call reports that it did not answer, which it may.
func (s *storm) wholeAnswer(ctx context.Context, what string, err error) bool {
	if err != nil && ctx.Err() == nil &&
		(errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)) {
		s.t.Errorf("%s says that its context ended, and it had not: %v", what, err)
	}
	return err == nil
}

func (s *storm) known(what string, status []pool.Status, allowed ...pool.Status) {
	for _, st := range status {
		if !slices.Contains(allowed, st) {
			s.t.Errorf("%s: status %d, want one of %v", what, st, allowed)
		}
	}
}
