package agent

import (
	"fmt"
	"path/filepath"

	"github.com/kvagent/kvagent/ipc"
)

// checkLookupName says whether a client may have a look-up socket of that name in dir.
func checkLookupName(dir, name string) error {
	if err := ipc.CheckName(name); err != nil {
		return err
	}
	if n := len(filepath.Join(dir, name)); n > ipc.MaxSocketPath {
		return fmt.Errorf("lookup_name: its path has %d bytes, allowed: at most %d (the directory's has %d)", n, ipc.MaxSocketPath, len(dir))
	}
	return nil
}
