package proof

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/cudaipc"
	"github.com/kvagent/kvagent/cudaipc/cuda"
)

// checkPin measures how long the driver takes to pin the pool, in small and in huge pages.
func checkPin(b *bench) error {
	size := min(b.sizes.pin, spareMemory()/4)
	for _, huge := range []bool{false, true} {
		name := "4KiB_pages"
		if huge {
			name = "huge_pages"
		}
		s, err := b.pin(size, huge)
		if errors.Is(err, errNoPages) {
			b.line.Facts[name] = fmt.Sprintf("no %d MiB of them (%v): see vm.nr_hugepages", size>>20, err)
			b.line.say("huge pages: %s", b.line.Facts[name])
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		per10 := s * float64(10<<30) / float64(size)
		b.line.Figures[name+"_s_per_10GiB"] = per10
		b.line.say("%s: %.2f s per 10 GiB", name, per10)
	}
	b.line.Figures["pinned_bytes"] = float64(size)
	return nil
}

// pin opens the GPU over an arena of size bytes and returns the seconds until all of it was
// pinned.
func (b *bench) pin(size int64, huge bool) (float64, error) {
	a, err := newArena(size, huge)
	if err != nil {
		return 0, err
	}
	defer a.close()
	d, err := cuda.Open(cuda.Options{Arena: a.mem})
	if err != nil {
		return 0, err
	}
	err = b.pinned(d)
	return d.Info().PinSeconds, errors.Join(err, d.Close(cudaipc.AllPeers))
}

// groupLimits are the files with the memory limit of a container, bytes.
var groupLimits = []string{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}

// spareMemory returns the unused memory of this machine, or the container's limit if that is
// less, bytes, rounded to huge pages.
func spareMemory() int64 {
	spare := int64(8 << 30)
	var i unix.Sysinfo_t
	if unix.Sysinfo(&i) == nil {
		spare = int64(i.Freeram+i.Bufferram) * int64(i.Unit)
	}
	for _, file := range groupLimits {
		text, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		if limit, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil { // "max" is none
			spare = min(spare, limit)
		}
	}
	return spare >> 23 << 23
}

// checkFootprint measures how much of the GPU's memory an agent's mover takes for itself.
func checkFootprint(b *bench) error {
	if err := b.open(b.sizes.region); err != nil {
		return err
	}
	before := b.free()
	if _, err := b.start(&order{Op: opAgent, Sizes: []int64{b.sizes.region}}); err != nil {
		return err
	}
	taken := float64(before-b.free()) / (1 << 20)
	b.line.Figures["agent_mib"] = taken
	b.line.say("an agent's mover takes %.0f MiB of the GPU", taken)
	return nil
}
