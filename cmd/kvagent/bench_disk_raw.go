package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// The disk tier's own defaults: pieces of a write, and how many writes and reads are under way at once.
const (
	rawWriteBytes = 8 << 20
	rawWriteDepth = 4
	rawReadDepth  = 32
	rawFileBytes  = 256 << 20
)

// rawDisk is what the disk does by itself: files with their room allocated, aligned memory, O_DIRECT.
type rawDisk struct {
	dir        string
	blockBytes int
	direct     bool
	files      []int
	memory     []byte
}

func openRawDisk(dir string, blockBytes int) (*rawDisk, error) {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	memory, err := unix.Mmap(-1, 0, max(rawWriteBytes, blockBytes*rawReadDepth), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, err
	}
	for i := range memory {
		memory[i] = byte(i * 7)
	}
	return &rawDisk{dir: dir, blockBytes: blockBytes, direct: true, memory: memory}, nil
}

func (r *rawDisk) close() error { return errors.Join(r.drop(), unix.Munmap(r.memory)) }

func (r *rawDisk) drop() (err error) {
	for _, fd := range r.files {
		err = errors.Join(err, unix.Close(fd))
	}
	r.files = nil
	return err
}

// prepare makes fresh files for so many bytes.
func (r *rawDisk) prepare(bytes int64) error {
	if err := r.drop(); err != nil {
		return err
	}
	for i := 0; int64(i)*rawFileBytes < bytes; i++ {
		path := filepath.Join(r.dir, fmt.Sprint(i))
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		const flags = unix.O_RDWR | unix.O_CREAT | unix.O_CLOEXEC
		fd, err := unix.Open(path, flags|unix.O_DIRECT, 0o600)
		if errors.Is(err, unix.EINVAL) {
			r.direct = false
			fd, err = unix.Open(path, flags, 0o600)
		}
		if err != nil {
			return fmt.Errorf("open %s: %w", path, err)
		}
		r.files = append(r.files, fd)
		if err := unix.Fallocate(fd, 0, 0, rawFileBytes); err != nil {
			return fmt.Errorf("allocate %s: %w", path, err)
		}
	}
	return nil
}

func (b *diskBench) rawWrite(int) error {
	total := int64(b.blocks) * int64(b.settings.blockBytes)
	pieces := int((total + rawWriteBytes - 1) / rawWriteBytes)
	return atOnce(rawWriteDepth, pieces, func(_, i int) error {
		off := int64(i) * rawWriteBytes
		n := min(rawWriteBytes, total-off)
		done, err := unix.Pwrite(b.raw.files[off/rawFileBytes], b.raw.memory[:n], off%rawFileBytes)
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
		done, err := unix.Pread(b.raw.files[off/rawFileBytes], b.raw.memory[int64(worker)*size:][:n], off%rawFileBytes)
		if err == nil && int64(done) != n {
			err = fmt.Errorf("%d of %d bytes read", done, n)
		}
		return err
	})
}

// atOnce does f for 0 to n-1, in order, so many at once.
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
