package arena

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The reason why the kernel makes no huge pages names the file with the setting.
func TestWhyNoTransparentPages(t *testing.T) {
	a, err := Open(1<<20, false)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for text, refused := range map[string]bool{
		"always within_size advise [never] deny force\n": true, "always within_size advise never [deny] force\n": true,
		"always within_size [advise] never deny force\n": false,
		"[always] within_size advise never deny force\n": false,
	} {
		file := filepath.Join(t.TempDir(), "shmem_enabled")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if why := a.askTransparent(file); refused != strings.Contains(why, file) || !refused && why != "" {
			t.Errorf("%q: %q", text, why)
		}
	}
	if why := a.askTransparent(filepath.Join(t.TempDir(), "none")); why == "" {
		t.Error("a kernel without the setting: nothing is said")
	}
}

// Only the arena's own mappings count, and only their pages of files.
func TestHugeBytesAreCounted(t *testing.T) {
	const smaps = `7f0000000000-7f0000200000 rw-s 00000000 00:01 7 /memfd:kvagent-pool
Rss:                2048 kB
ShmemPmdMapped:     2048 kB
FilePmdMapped:         0 kB
7f0000200000-7f0000600000 rw-s 00200000 00:01 7 /memfd:kvagent-pool
ShmemPmdMapped:     2048 kB
FilePmdMapped:         4 kB
VmFlags: rd wr sh
7f0000600000-7f0000800000 rw-p 00000000 00:00 0
AnonHugePages:      2048 kB
ShmemPmdMapped:     2048 kB
`
	if n, err := sumHuge(strings.NewReader(smaps), 0x7f0000000000, 0x7f0000600000); err != nil || n != 4<<20+4<<10 {
		t.Errorf("%d bytes, %v, want %d", n, err, 4<<20+4<<10)
	}
	if _, err := sumHuge(strings.NewReader("0-1000 rw-s 0 0 0\nShmemPmdMapped: x kB\n"), 0, 1<<20); err == nil {
		t.Error("a count that is none: no error")
	}
	a, err := Open(1<<20, false)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if n, err := a.OnHuge(); err != nil || n < 0 || n > 1<<20 {
		t.Errorf("%d of %d bytes, %v", n, 1<<20, err)
	}
}
