package arena

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// maxNode is the last NUMA node of Linux.
const maxNode = 1023

// Modes of mbind, as linux/mempolicy.h has them. In both, pages come from other nodes when these
// are full.
const (
	mpolPreferred  = 1
	mpolInterleave = 3
)

// Place has the kernel take an arena's pages from these NUMA nodes first, and from several in turn.
// The policy is the file's: it counts for whichever process touches a page first, and not for pages
// that are there already. It says what came of it; a kernel or a container that does not allow it
// makes things slower, not wrong.
func (a *Arena) Place(nodes []int) string {
	if len(nodes) == 0 {
		return ""
	}
	if err := bindPages(a.raw, nodes); err != nil {
		return fmt.Sprintf("not on %s first: %v", nameNodes(nodes), err)
	}
	return nameNodes(nodes) + " first"
}

func bindPages(mem []byte, nodes []int) error {
	var mask [(maxNode + 1) / 64]uint64
	for _, n := range nodes {
		if n < 0 || n > maxNode {
			return fmt.Errorf("node %d is not within 0 and %d", n, maxNode)
		}
		mask[n/64] |= 1 << (n % 64)
	}
	mode := uintptr(mpolPreferred)
	if len(nodes) > 1 {
		mode = mpolInterleave
	}
	_, _, errno := unix.Syscall6(unix.SYS_MBIND, uintptr(unsafe.Pointer(&mem[0])), uintptr(len(mem)), mode,
		uintptr(unsafe.Pointer(&mask)), maxNode+2, 0)
	if errno != 0 {
		return fmt.Errorf("mbind: %w", errno)
	}
	return nil
}

func nameNodes(nodes []int) string {
	if len(nodes) == 1 {
		return fmt.Sprintf("NUMA node %d", nodes[0])
	}
	return fmt.Sprintf("NUMA nodes %v in turn", slices.Sorted(slices.Values(nodes)))
}

// populatePiece is populated in one call: the longest that Close waits for.
const populatePiece = 64 << 20

// populating gives an arena its (zeroed) pages in the background. The goroutine is the arena's:
// StopPopulating joins it.
type populating struct {
	stop atomic.Bool
	done sync.WaitGroup
	err  error // valid when done
}

// Populate begins to give the arena its pages. Those that cannot be had are left to probe, which
// touches the pages of a stretch one by one and counts the ones it retires.
func (a *Arena) Populate(probe func(from, to int64) (bad int)) {
	left, base, p := MaxBadPages, a.base, &a.populating
	p.done.Go(func() {
		for off := 0; off < len(base) && !p.stop.Load(); off += populatePiece {
			to := min(off+populatePiece, len(base))
			err := populate(base[off:to])
			if errors.Is(err, unix.EHWPOISON) || errors.Is(err, unix.EFAULT) {
				if bad := probe(int64(off), int64(to)); bad <= left {
					left, err = left-bad, nil
				}
			}
			if err != nil {
				p.err = fmt.Errorf("dram: populate at %d of %d bytes: %w", off, len(base), err)
				return
			}
			a.ready.Store(int64(to))
		}
	})
}

// populate faults pages in for writing without changing a byte: slots may be in use meanwhile.
func populate(b []byte) error {
	for {
		switch err := unix.Madvise(b, unix.MADV_POPULATE_WRITE); {
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.EAGAIN):
		case errors.Is(err, unix.EINVAL): // before Linux 5.14: pages come as they are touched
			return nil
		default:
			return err
		}
	}
}

// Populated returns when populating has ended, and why it ended before all pages were there.
func (a *Arena) Populated() error {
	a.populating.done.Wait()
	return a.populating.err
}

// StopPopulating ends it.
func (a *Arena) StopPopulating() {
	a.populating.stop.Store(true)
	a.populating.done.Wait()
}

// Ready is how much is populated.
func (a *Arena) Ready() int64 { return a.ready.Load() }

// shmemHuge says whether files in memory may have huge pages that the kernel makes up itself; the
// word in brackets counts.
const shmemHuge = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

// MakeHuge asks for huge pages that nobody has set aside, and says why the arena will get none;
// empty: it may, or has them.
func (a *Arena) MakeHuge() string {
	if a.pageBytes == HugePageBytes {
		return ""
	}
	return a.askTransparent(shmemHuge)
}

// askTransparent asks for huge pages that nobody has set aside, where the arena's own are small,
// and says why it will get none; empty: it may.
func (a *Arena) askTransparent(setting string) string {
	if err := unix.Madvise(a.raw, unix.MADV_HUGEPAGE); err != nil {
		return fmt.Sprintf("madvise: %v", err)
	}
	text, err := os.ReadFile(setting)
	if err != nil {
		return "this kernel has none"
	}
	if strings.Contains(string(text), "[never]") || strings.Contains(string(text), "[deny]") {
		return fmt.Sprintf("%s is %s", setting, strings.TrimSpace(string(text)))
	}
	return ""
}

// OnHuge is how much of the arena lies on huge pages now, as the kernel says: all of it where they
// were set aside, else what the kernel found by itself. It takes milliseconds for each 10 GiB.
func (a *Arena) OnHuge() (int64, error) {
	if a.pageBytes == HugePageBytes {
		return a.ready.Load(), nil
	}
	return mappedHuge(a.raw)
}

// mappedHuge is how much of mem is mapped in this process by huge pages, bytes.
func mappedHuge(mem []byte) (int64, error) {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	from := uint64(uintptr(unsafe.Pointer(&mem[0])))
	return sumHuge(f, from, from+uint64(len(mem)))
}

// sumHuge reads of a process's mappings (proc_pid_smaps(5)) how much of those between two addresses
// is on huge pages of files, bytes.
func sumHuge(smaps io.Reader, from, to uint64) (total int64, err error) {
	within := false
	lines := bufio.NewScanner(smaps)
	for lines.Scan() {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 {
			continue
		}
		if low, high, ok := strings.Cut(fields[0], "-"); ok {
			begin, err := strconv.ParseUint(low, 16, 64)
			end, wrong := strconv.ParseUint(high, 16, 64)
			within = err == nil && wrong == nil && begin >= from && end <= to
		} else if within && (fields[0] == "ShmemPmdMapped:" || fields[0] == "FilePmdMapped:") {
			kib, err := strconv.ParseInt(fields[1], 10, 64)
			if err != nil {
				return 0, fmt.Errorf("smaps: %q: %w", lines.Text(), err)
			}
			total += kib << 10
		}
	}
	return total, lines.Err()
}
