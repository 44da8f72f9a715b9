package proof

import (
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// host says on what machine this is, as far as figures depend on it.
func host() string {
	text := fmt.Sprintf("%d processors", runtime.NumCPU())
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		text += ", Linux " + unix.ByteSliceToString(u.Release[:])
	}
	if driver, err := os.ReadFile("/proc/driver/nvidia/version"); err == nil {
		first, _, _ := strings.Cut(string(driver), "\n")
		text += ", " + first
	}
	return text
}
