package arena

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// holders are the processes that have a file open or mapped, as far as this one may see them, and without it.
func holders(fd int) (out []int) {
	var st unix.Stat_t
	if unix.Fstat(fd, &st) != nil {
		return nil
	}
	all, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, p := range all {
		pid, err := strconv.Atoi(p.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if opens(pid, &st) || !uninterruptible(pid) && maps(pid, &st) {
			out = append(out, pid)
		}
	}
	slices.Sort(out)
	return out
}

// uninterruptible says whether a thread of a process waits in the kernel and can not be
// interrupted. It may hold the lock of the process's memory, and then whoever reads what is mapped
// waits for it too.
func uninterruptible(pid int) bool {
	dir := fmt.Sprintf("/proc/%d/task", pid)
	all, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, task := range all {
		text, err := os.ReadFile(dir + "/" + task.Name() + "/stat")
		if err == nil && strings.HasPrefix(string(text[strings.LastIndexByte(string(text), ')')+1:]), " D") {
			return true
		}
	}
	return false
}

// maps looks for device and inode, the fourth and fifth word of a line.
func maps(pid int, st *unix.Stat_t) bool {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return false
	}
	want := fmt.Sprintf(" %02x:%02x %d ", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	return strings.Contains(string(text), want)
}

func opens(pid int, st *unix.Stat_t) bool {
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	all, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, f := range all {
		var have unix.Stat_t
		if unix.Stat(dir+"/"+f.Name(), &have) == nil && have.Ino == st.Ino && have.Dev == st.Dev {
			return true
		}
	}
	return false
}

// processBegan is when a process began, in clock ticks since the machine did; 0 if there is none.
func processBegan(pid int) uint64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	// The name may hold anything: what counts begins behind its last bracket, with word 3.
	words := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(words) < 20 {
		return 0
	}
	n, err := strconv.ParseUint(words[22-3], 10, 64)
	if err != nil {
		return 0
	}
	return n
}
