package proof

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc/cuda"
	"github.com/kvagent/kvagent/cudaipc/devicetest"
)

// checkPin measures how long the driver takes to pin the pool, in small and in huge pages.
func checkPin(b *bench) {
	size := min(b.sizes.pin, spareMemory()/4)
	for _, pages := range []struct {
		name  string
		flags int
	}{{"4KiB_pages", 0}, {"huge_pages", unix.MFD_HUGETLB | unix.MFD_HUGE_2MB}} {
		arena, err := mapFile(size, pages.flags)
		if err != nil && pages.flags != 0 {
			b.line.Facts[pages.name] = fmt.Sprintf("no %d MiB of them (%v): see vm.nr_hugepages", size>>20, err)
			b.line.say("huge pages: %s", b.line.Facts[pages.name])
			continue
		}
		b.must(err)
		b.part(func() {
			b.closes(func() error { return unix.Munmap(arena) })
			per10 := b.pin(arena) * float64(10<<30) / float64(size)
			b.line.Figures[pages.name+"_s_per_10GiB"] = per10
			b.line.say("%s: %.2f s per 10 GiB", pages.name, per10)
		})
	}
	b.line.Figures["pinned_bytes"] = float64(size)
}

// pin opens the GPU over an arena and returns the seconds until all of it was pinned.
func (b *bench) pin(arena []byte) float64 {
	d, err := cuda.Open(cuda.Options{Arena: arena})
	b.must(err)
	b.closes(d.Close)
	devicetest.Pinned(b, d)
	b.pinned(d.Info())
	return d.Info().PinSeconds
}

// mapFile maps a populated file in memory, as the pool is one, so that pinning does not wait for
// pages.
func mapFile(size int64, flags int) ([]byte, error) {
	fd, err := unix.MemfdCreate("kvagent-proof", unix.MFD_CLOEXEC|flags)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fd) }() // the mapping keeps the file
	if err := unix.Ftruncate(fd, size); err != nil {
		return nil, err
	}
	return unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
}

// spareMemory returns the unused memory of this machine, or the container's limit if that is
// less, bytes, rounded to huge pages.
func spareMemory() int64 {
	spare := int64(8 << 30)
	var i unix.Sysinfo_t
	if unix.Sysinfo(&i) == nil {
		spare = int64(i.Freeram+i.Bufferram) * int64(i.Unit)
	}
	text, _ := os.ReadFile("/sys/fs/cgroup/memory.max") // "max", or no such file, is no limit
	if limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
		spare = min(spare, limit)
	}
	return spare >> 23 << 23
}
