package mooncake

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// module is the helper's module in the Python package kvagent.
const module = "kvagent.mooncake"

// checkPython returns an error that names what is to be installed, if anything is.
func checkPython(o *Options) error {
	path, err := exec.LookPath(o.Python)
	if err != nil {
		return fmt.Errorf("mooncake: Python is %q, which is not installed: install Python 3.10 or newer, "+
			"then pip install kvagent mooncake-transfer-engine: %w", o.Python, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), checkWithin)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "-m", module, "check")
	cmd.Env = o.environment()
	out, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	text := lastLine(out)
	if strings.Contains(text, "kvagent") && !strings.HasPrefix(text, module) {
		text += ": pip install kvagent mooncake-transfer-engine"
	}
	return fmt.Errorf("mooncake: Python at %s: %w: %s", path, err, text)
}

func lastLine(out []byte) string {
	lines := bytes.Split(bytes.TrimSpace(out), []byte("\n"))
	return string(lines[len(lines)-1])
}

// environment returns the helper's environment: limits of its waiting, then what the caller set.
func (o *Options) environment() []string {
	rpc := strconv.FormatInt(o.RPCWithin.Milliseconds(), 10)
	env := append(os.Environ(), "MC_RPC_TIMEOUT_MS="+rpc, "MC_RPC_CONNECT_TIMEOUT_MS="+rpc, "PYTHONUNBUFFERED=1")
	return append(env, o.Env...)
}
