package arena

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// shmemHuge says whether files in memory may have huge pages that the kernel makes up itself; the word in brackets counts.
const shmemHuge = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"

// MakeHuge asks for huge pages that nobody has set aside, and says why the arena will get none; empty: it may, or has them.
func (a *Arena) MakeHuge() string {
	if a.pageBytes == HugePageBytes {
		return ""
	}
	return a.askTransparent(shmemHuge)
}

// askTransparent asks for huge pages that nobody has set aside, where the arena's own are small, and says why it will get none;
// empty: it may.
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

// OnHuge is how much of the arena lies on huge pages now, as the kernel says: all of it where they were set aside, else what the
// kernel found by itself. It takes milliseconds for each 10 GiB.
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

// sumHuge reads of a process's mappings (proc_pid_smaps(5)) how much of those between two addresses is on huge pages of files, bytes.
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
