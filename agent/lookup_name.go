package agent

import (
	"fmt"
	"path/filepath"
	"strings"

	"github.com/kvagent/kvagent/ipc"
)

// checkLookupName says whether a client may have a look-up socket of that name.
func checkLookupName(dir, name string) error {
	if err := checkName("lookup_name", name); err != nil {
		return err
	}
	switch {
	case strings.ContainsRune(name, '/'):
		return fmt.Errorf("lookup_name: %q, allowed: no slash", name)
	case strings.HasPrefix(name, "."):
		return fmt.Errorf("lookup_name: %q, allowed: no leading dot", name)
	case name == ipc.SessionSocket || name == ipc.AdminSocket || name == ipc.LookupSocket:
		return fmt.Errorf("lookup_name: %q, allowed: none of the agent's own (%s, %s, %s)", name, ipc.SessionSocket, ipc.AdminSocket, ipc.LookupSocket)
	case strings.HasSuffix(name, ".lock"):
		return fmt.Errorf("lookup_name: %q, allowed: not ending in .lock", name)
	}
	if n := len(filepath.Join(dir, name)); n > ipc.MaxSocketPath {
		return fmt.Errorf("lookup_name: its path has %d bytes, allowed: at most %d (the directory's has %d)", n, ipc.MaxSocketPath, len(dir))
	}
	return nil
}
