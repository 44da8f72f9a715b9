package disk

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/pool"
)

// What the benchmark moves at once, as the store's own threads do.
const (
	benchPutters    = 8 // goroutines that put and get, a batch at a time
	benchBatchBytes = 16 << 20
	rawWriteBytes   = 8 << 20
	rawWriters      = 4
	rawReaders      = 32
)

// BenchmarkBesideTheDisk writes and reads new blocks through the store and, in turn, the same bytes
// past it and the page cache, by as large calls. It reports the store's GB/s and the medians of its
// rates as parts of the disk's own. Each iteration takes 512 MiB more of the disk under TMPDIR.
func BenchmarkBesideTheDisk(b *testing.B) {
	const total = 256 << 20
	for _, block := range []int{128 << 10, 1 << 20} {
		b.Run(fmt.Sprint(block>>10, "KiB"), func(b *testing.B) {
			dir := b.TempDir()
			s, err := Open(Options{
				Dirs: []Dir{{Path: filepath.Join(dir, "store"), Bytes: 64 << 30}}, SegmentBytes: total,
			})
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { closeNow(b, s) })
			var memory [rawReaders][]byte
			for i := range memory {
				if memory[i], err = mapMemory(benchBatchBytes); err != nil {
					b.Fatal(err)
				}
				for at := 0; at < len(memory[i]); {
					at += copy(memory[i][at:], noise[i:])
				}
				b.Cleanup(func() { _ = unmap(memory[i]) }) // the process ends
			}
			round, order := 0, []int(nil)
			through := func(do func([]pool.Item) error) error {
				each := benchBatchBytes / block
				return atOnce(benchPutters, len(order)/each, func(worker, i int) error {
					items := make([]pool.Item, each)
					for k, n := range order[i*each:][:each] {
						items[k] = pool.Item{Key: keyOf(round*len(order) + n), Data: memory[worker][k*block:][:block]}
					}
					err := do(items)
					if i := slices.IndexFunc(items, func(it pool.Item) bool { return it.Status != pool.OK }); i >= 0 {
						err = errors.Join(err, fmt.Errorf("block %d has status %d", i, items[i].Status))
					}
					return err
				})
			}
			var fd int
			past := func(workers, bytes int, call func(int, []byte, int64) (int, error)) error {
				where := rand.Perm(total / bytes)
				return atOnce(workers, len(where), func(worker, i int) error {
					n, err := call(fd, memory[worker][:bytes], int64(where[i])*int64(bytes))
					if err == nil && n != bytes {
						err = fmt.Errorf("%d of %d bytes", n, bytes)
					}
					return err
				})
			}
			var took [4][]float64
			for b.Loop() {
				b.StopTimer()
				round++
				path := filepath.Join(dir, fmt.Sprint(round))
				fd, err = unix.Open(path, unix.O_RDWR|unix.O_CREAT|unix.O_CLOEXEC|unix.O_DIRECT, 0o600)
				if err == nil {
					err = unix.Fallocate(fd, 0, 0, total)
				}
				order = rand.Perm(total / block)
				b.StartTimer()
				for i, step := range []func() error{
					func() error { return through(func(it []pool.Item) error { return s.Put(b.Context(), it) }) },
					func() error { return past(rawWriters, rawWriteBytes, unix.Pwrite) },
					func() error { return through(func(it []pool.Item) error { return s.Get(b.Context(), it) }) },
					func() error { return past(rawReaders, block, unix.Pread) },
				} {
					began := time.Now()
					if err = errors.Join(err, step()); err != nil {
						b.Fatal(err)
					}
					took[i] = append(took[i], time.Since(began).Seconds())
				}
				_ = unix.Close(fd) // its bytes are not needed
			}
			for i, name := range []string{"write", "read"} {
				store, raw := took[2*i], took[2*i+1]
				b.ReportMetric(total/1e9/median(store), name+"-GB/s")
				ratios := make([]float64, len(store))
				for k := range store {
					ratios[k] = raw[k] / store[k]
				}
				b.ReportMetric(median(ratios), name+"-of-disk")
			}
		})
	}
}

func median(all []float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}

// atOnce calls f for 0 to n-1, in order, by that many workers.
func atOnce(workers, n int, f func(worker, i int) error) error {
	errs := make([]error, workers)
	var next atomic.Int64
	var all sync.WaitGroup
	for w := range workers {
		all.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && errs[w] == nil; i = int(next.Add(1)) - 1 {
				errs[w] = f(w, i)
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}
