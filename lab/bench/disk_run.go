package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/disk"
)

const (
	diskPutters    = 8 // goroutines that put, as many that get
	diskBatchBytes = 16 << 20
)

// diskBench is a disk tier, plain files next to it, and the memory that blocks come from and go to.
type diskBench struct {
	settings *diskSettings
	dir      string
	store    *disk.Store
	raw      *rawDisk
	blocks   int // of one measurement
	random   *rand.Rand
	memory   [][]byte // of each goroutine
}

func measureDisk(s *diskSettings) (r *diskReport, err error) {
	dir, err := os.MkdirTemp(s.dir, "kvagent-bench-disk-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	b := &diskBench{settings: s, dir: dir, blocks: int(s.bytes) / s.blockBytes, random: rand.New(rand.NewPCG(1, 2))}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.open(); err != nil {
		return nil, err
	}
	return b.run()
}

func (b *diskBench) open() (err error) {
	// Room for every round, with what headers and rounding to pages add to small blocks.
	room := (b.settings.bytes*int64(b.settings.rounds+2))*9/8 + 4<<30
	b.store, err = disk.Open(disk.Options{Dirs: []disk.Dir{{Path: filepath.Join(b.dir, "store"), Bytes: room}},
		SegmentBytes: 256 << 20})
	if err != nil {
		return err
	}
	for range diskPutters {
		memory := make([]byte, diskBatchBytes)
		for i := 0; i < len(memory); i += 8 {
			binary.LittleEndian.PutUint64(memory[i:], b.random.Uint64())
		}
		b.memory = append(b.memory, memory)
	}
	b.raw, err = openRawDisk(filepath.Join(b.dir, "raw"), b.settings.blockBytes)
	return err
}

func (b *diskBench) close() (err error) {
	if b.store != nil {
		err = b.store.Close()
	}
	if b.raw != nil {
		err = errors.Join(err, b.raw.close())
	}
	return err
}

// run alternates the measurements, each round in another order, so that changes of the disk's speed
// affect both alike. The first round, in which all memory is touched for the first time, does not
// count.
func (b *diskBench) run() (*diskReport, error) {
	r := &diskReport{BlockBytes: b.settings.blockBytes, Bytes: int64(b.blocks) * int64(b.settings.blockBytes),
		Rounds: b.settings.rounds}
	var write, rawWrite, read, rawRead []float64
	for round := range b.settings.rounds + 1 {
		if err := b.raw.prepare(round, r.Bytes); err != nil {
			return nil, err
		}
		steps := []struct {
			into *[]float64
			f    func(round int) error
		}{{&write, b.put}, {&rawWrite, b.rawWrite}, {&read, b.get}, {&rawRead, b.rawRead}}
		if round%2 == 1 {
			steps[0], steps[1], steps[2], steps[3] = steps[1], steps[0], steps[3], steps[2]
		}
		for _, s := range steps {
			began := time.Now()
			if err := s.f(round); err != nil {
				return nil, err
			}
			if took := time.Since(began); round > 0 {
				*s.into = append(*s.into, float64(r.Bytes)/1e9/took.Seconds())
			}
		}
	}
	st := b.store.Stats()
	r.Direct = st.Dirs[0].Direct && b.raw.direct
	r.WriteRatioLow, r.WriteRatio, r.WriteRatioHigh = quartiles(write, rawWrite)
	r.ReadRatioLow, r.ReadRatio, r.ReadRatioHigh = quartiles(read, rawRead)
	r.WriteGBps, r.RawWriteGBps, r.ReadGBps, r.RawReadGBps = middle(write), middle(rawWrite), middle(read), middle(
		rawRead)
	r.Ratio = min(r.WriteRatio, r.ReadRatio)
	return r, nil
}

// quartiles returns the quartiles of the ratios of adjacent measurements, with the median.
func quartiles(a, b []float64) (low, median, high float64) {
	ratios := make([]float64, len(a))
	for i := range a {
		ratios[i] = a[i] / b[i]
	}
	slices.Sort(ratios)
	return ratios[len(ratios)/4], ratios[len(ratios)/2], ratios[len(ratios)*3/4]
}

func middle(all []float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}

func (b *diskBench) put(round int) error {
	return b.batches(b.inOrder(), func(items []pool.Item) error { return b.store.Put(context.Background(), items) },
		round)
}

func (b *diskBench) get(round int) error {
	return b.batches(b.random.Perm(b.blocks), func(items []pool.Item) error {
		return b.store.Get(context.Background(),
			items)
	}, round)
}

func (b *diskBench) inOrder() []int {
	order := make([]int, b.blocks)
	for i := range order {
		order[i] = i
	}
	return order
}

// batches has the goroutines take batches of the blocks in order, until none is left.
func (b *diskBench) batches(order []int, do func(items []pool.Item) error, round int) error {
	errs := make([]error, diskPutters)
	next := make(chan []int)
	var all sync.WaitGroup
	for w := range diskPutters {
		all.Go(func() {
			for batch := range next {
				errs[w] = errors.Join(errs[w], b.batch(batch, do, round, b.memory[w]))
			}
		})
	}
	for batch := range slices.Chunk(order, max(1, min(diskBatchBytes/b.settings.blockBytes,
		len(order)/(2*diskPutters)))) {
		next <- batch
	}
	close(next)
	all.Wait()
	return errors.Join(errs...)
}

func (b *diskBench) batch(which []int, do func(items []pool.Item) error, round int, memory []byte) error {
	items := make([]pool.Item, len(which))
	for i, n := range which {
		hash := binary.LittleEndian.AppendUint64(nil, uint64(round*b.blocks+n))
		items[i].Key = pool.Key{Hash: pool.MakeHash(hash)}
		items[i].Data = memory[i*b.settings.blockBytes:][:b.settings.blockBytes]
	}
	if err := do(items); err != nil {
		return err
	}
	for i := range items {
		if items[i].Status != pool.OK {
			return fmt.Errorf("block %d has status %d", which[i], items[i].Status)
		}
	}
	return nil
}
