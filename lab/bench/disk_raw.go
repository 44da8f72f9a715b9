package bench

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// The disk tier's own defaults: pieces of a write, and how many writes and reads are in flight.
const (
	rawWriteBytes = 8 << 20
	rawWriteDepth = 4
	rawReadDepth  = 32
	rawFileBytes  = 256 << 20
)

// rawDisk is the disk without the tier: files with their room allocated, memory in huge pages as
// far as there are any, O_DIRECT.
type rawDisk struct {
	dir    string
	direct bool
	files  []int // of this round
	memory [][]byte
}

func openRawDisk(dir string, blockBytes int) (*rawDisk, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	r := &rawDisk{dir: dir, direct: true}
	each := max(rawWriteBytes, blockBytes*(rawReadDepth/rawWriteDepth))
	for range rawWriteDepth {
		memory, err := rawMemory(each)
		if err != nil {
			return nil, errors.Join(err, r.close())
		}
		r.memory = append(r.memory, memory)
	}
	return r, nil
}

// rawMemory returns memory with different bytes in every page, so that no layer below can merge
// them.
func rawMemory(n int) ([]byte, error) {
	memory, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	_ = unix.Madvise(memory, unix.MADV_HUGEPAGE) // a kernel without huge pages measures without them
	r := rand.New(rand.NewPCG(uint64(n), 3))
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(memory[i:], r.Uint64())
	}
	return memory, nil
}

// reader returns the memory of a reader's blocks.
func (r *rawDisk) reader(worker, blockBytes int) []byte {
	return r.memory[worker%rawWriteDepth][worker/rawWriteDepth*blockBytes:][:blockBytes]
}

func (r *rawDisk) close() (err error) {
	for _, memory := range r.memory {
		err = errors.Join(err, unix.Munmap(memory))
	}
	return errors.Join(err, r.drop())
}

func (r *rawDisk) drop() (err error) {
	for _, fd := range r.files {
		err = errors.Join(err, unix.Close(fd))
	}
	r.files = nil
	return err
}

// prepare creates files for the bytes of a round. Those of earlier rounds stay: a device is slow
// for a while after a discard.
func (r *rawDisk) prepare(round int, bytes int64) error {
	if err := r.drop(); err != nil {
		return err
	}
	for i := 0; int64(i)*rawFileBytes < bytes; i++ {
		path := filepath.Join(r.dir, fmt.Sprintf("%d-%d", round, i))
		const flags = unix.O_RDWR | unix.O_CREAT | unix.O_EXCL | unix.O_CLOEXEC
		fd, err := unix.Open(path, flags|unix.O_DIRECT, 0o600)
		if errors.Is(err, unix.EINVAL) {
			r.direct = false
			fd, err = unix.Open(path, flags&^unix.O_EXCL, 0o600)
		}
		if err != nil {
			return fmt.Errorf("open %s: %w", path, err)
		}
		r.files = append(r.files, fd)
		if err := unix.Fallocate(fd, 0, 0, min(rawFileBytes, bytes-int64(i)*rawFileBytes)); err != nil {
			return fmt.Errorf("allocate %s: %w", path, err)
		}
	}
	return nil
}

func (b *diskBench) rawWrite(int) error {
	total := int64(b.blocks) * int64(b.settings.blockBytes)
	pieces := int((total + rawWriteBytes - 1) / rawWriteBytes)
	return atOnce(rawWriteDepth, pieces, func(worker, i int) error {
		off := int64(i) * rawWriteBytes
		n := min(rawWriteBytes, total-off)
		done, err := unix.Pwrite(b.raw.files[off/rawFileBytes], b.raw.memory[worker][:n], off%rawFileBytes)
		if err == nil && int64(done) != n {
			err = fmt.Errorf("%d of %d bytes written", done, n)
		}
		return err
	})
}

func (b *diskBench) rawRead(int) error {
	order := b.random.Perm(b.blocks)
	size := int64(b.settings.blockBytes)
	return atOnce(rawReadDepth, b.blocks, func(worker, i int) error {
		off := int64(order[i]) * size
		n := min(size, rawFileBytes-off%rawFileBytes)
		done, err := unix.Pread(b.raw.files[off/rawFileBytes], b.raw.reader(worker, int(size))[:n], off%rawFileBytes)
		if err == nil && int64(done) != n {
			err = fmt.Errorf("%d of %d bytes read", done, n)
		}
		return err
	})
}

// atOnce calls f for 0 to n-1, in order, that many at once.
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
