package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Shape of the engine that saves. The blocks of an epoch are dropped before the pool is full, so
// that no block that is asked for is evicted.
const (
	saveBlockBytes = 64 << 10
	saveBlocks     = 64 // of a job, and of the engine's memory
	saveAhead      = 2  // jobs that wait or run
	saveEpochJobs  = 16
)

// lookupSaver is an engine that saves as fast as the agent takes it.
type lookupSaver struct {
	conn  *ipc.Conn
	bytes atomic.Int64
	stop  atomic.Bool
	ended atomic.Bool // by an error, unless it was stopped
	done  chan error

	epoch  uint32
	job    uint64
	number uint64 // of the newest hash
}

func startSaver(dir string) (*lookupSaver, error) {
	c, _, err := dialBench(dir, &ipc.Register{
		Req: 1, Instance: "saver", Role: ipc.RoleWorker, World: 1, Held: []uint32{0}, Shards: 1,
		HashTokens: lookupBlockTokens,
		Identity: []ipc.Pair{{Key: "dtype", Value: "bfloat16"}, {Key: "model", Value: "saver"},
			{Key: "tenant", Value: ""}},
		Groups: []ipc.GroupDesc{{BlockTokens: lookupBlockTokens, NumBlocks: saveBlocks}},
	}, saveBlocks*saveBlockBytes, saveBlockBytes)
	if err != nil {
		return nil, err
	}
	s := &lookupSaver{conn: c, done: make(chan error, 1), epoch: 1}
	go func() {
		err := s.run()
		s.ended.Store(true)
		s.done <- err
	}()
	return s, nil
}

// run saves until it is told to stop.
func (s *lookupSaver) run() error {
	for !s.stop.Load() {
		for range saveAhead {
			if err := s.submit(); err != nil {
				return err
			}
		}
		for range saveEpochJobs - saveAhead {
			if err := errors.Join(s.await(), s.submit()); err != nil {
				return err
			}
		}
		for range saveAhead {
			if err := s.await(); err != nil {
				return err
			}
		}
		if err := s.reset(); err != nil {
			return err
		}
	}
	return nil
}

func (s *lookupSaver) submit() error {
	section := ipc.Section{HashLen: pool.MaxHashLen}
	for block := range uint32(saveBlocks) {
		s.number++
		hash := binary.LittleEndian.AppendUint64(make([]byte, 0, pool.MaxHashLen), s.number)
		section.Hashes = append(section.Hashes, hash[:pool.MaxHashLen]...)
		section.Blocks = binary.LittleEndian.AppendUint32(section.Blocks, block)
	}
	s.job++
	return s.conn.Send(&ipc.Save{Job: s.job, Epoch: s.epoch, Event: ipc.None, Revoke: ipc.None,
		Sections: []ipc.Section{section}})
}

func (s *lookupSaver) await() error {
	done, err := receive[*ipc.Done](s.conn)
	if err != nil {
		return err
	}
	for _, status := range done.Status {
		if status != byte(pool.OK) {
			return fmt.Errorf("a block was not saved: status %d", status)
		}
	}
	s.bytes.Add(saveBlocks * saveBlockBytes)
	return nil
}

func (s *lookupSaver) reset() error {
	if err := s.conn.Send(&ipc.Reset{Req: 2}); err != nil {
		return err
	}
	done, err := receive[*ipc.ResetDone](s.conn)
	if err != nil {
		return err
	}
	s.epoch = done.Epoch
	return nil
}

// close ends the saving, and the engine.
func (s *lookupSaver) close() error {
	s.stop.Store(true)
	err := <-s.done
	return errors.Join(err, s.conn.Close())
}

// besideSaves measures look-ups of clients that ask concurrently, that many of each, while an
// engine saves.
func besideSaves(t testing.TB, s lookupSettings, clients, n int) (p50, p99, savedGBs float64) {
	t.Setenv(asCommand, "1")
	s.agent = lookupReal
	b, err := newLookupBench(&s, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := b.close(); err != nil {
			t.Error(err)
		}
	}()
	saver, err := startSaver(b.dir)
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	took := make([][]float64, clients)
	began, before := time.Now(), saver.bytes.Load()
	for i := range clients {
		all.Go(func() {
			a := b.newAsker(uint64(i), false)
			defer a.agent.Close()
			for len(took[i]) < s.rounds || saver.bytes.Load() == before && !saver.ended.Load() {
				err := a.draw(n)
				us := 0.0
				if err == nil {
					us, err = a.ask()
				}
				if err != nil {
					t.Error(err)
					return
				}
				took[i] = append(took[i], us)
			}
		})
	}
	all.Wait()
	savedGBs = float64(saver.bytes.Load()-before) / time.Since(began).Seconds() / 1e9
	if err := saver.close(); err != nil {
		t.Error(err)
	}
	sorted := slices.Sorted(slices.Values(slices.Concat(took...)))
	if len(sorted) == 0 {
		t.Fatal("nothing was asked")
	}
	return sorted[len(sorted)/2], sorted[len(sorted)*99/100], savedGBs
}

// BenchmarkLookupBesideSaves has eight clients ask for 128 hashes each while an engine saves.
func BenchmarkLookupBesideSaves(b *testing.B) {
	s := lookupSettings{blocks: 1 << 20, rounds: max(b.N, 100)}
	p50, p99, saved := besideSaves(b, s, 8, 128)
	b.ReportMetric(p50, "p50-us")
	b.ReportMetric(p99, "p99-us")
	b.ReportMetric(saved, "saved-GB/s")
}
