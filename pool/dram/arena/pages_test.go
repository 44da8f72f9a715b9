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
