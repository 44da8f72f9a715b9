package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvagent/kvagent/settings"
)

// readSettings gives the settings of serve from a command line, an environment and a file.
func readSettings(t *testing.T, args []string, env map[string]string, file string) (*serveSettings, error) {
	t.Helper()
	s := defaultServeSettings()
	cmd := &cobra.Command{Use: "serve"}
	s.addFlags(cmd)
	flags := cmd.Flags()
	if file != "" {
		path := filepath.Join(t.TempDir(), "kvagent.yaml")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config", path)
	}
	if err := flags.Parse(args); err != nil {
		return s, err
	}
	err := settings.Fill(flags, func(name string) (string, bool) {
		v, ok := env[name]
		return v, ok
	})
	if err == nil {
		err = s.check()
	}
	return s, err
}

// A flag goes before the environment, that before the file, that before the default.
func TestSettingsPrecedence(t *testing.T) {
	const file = "pool: 3GiB\ndrain-timeout: 3s\nkeep-percent: 3\nlog-level: warn\nallow-uid: [3, 4]\nlog-json: " +
		"true\nverify-sample: 7\nhttp: [127.0.0.1:80, node-7]\n"
	env := map[string]string{"KVAGENT_POOL": "2GiB", "KVAGENT_DRAIN_TIMEOUT": "2s", "KVAGENT_ALLOW_GID": "5,6",
		"KVAGENT_PACE": "1.5GiB/s"}
	s, err := readSettings(t, []string{"--pool", "1.5GiB"}, env, file)
	if err != nil {
		t.Fatal(err)
	}
	for what, ok := range map[string]bool{
		"pool of the flag":          s.pool == 3<<29,
		"drain-timeout of the env":  s.drainTimeout == 2*time.Second,
		"pace of the env":           s.pace == 3<<29,
		"keep-percent of the file":  s.keepPercent == 3,
		"log-level of the file":     s.logLevel == "warn",
		"allow-uid of the file":     slices.Equal(s.allowUIDs, []uint32{3, 4}),
		"allow-gid of the env":      slices.Equal(s.allowGIDs, []uint32{5, 6}),
		"log-json of the file":      s.logJSON,
		"http of the file":          slices.Equal(s.http, []string{"127.0.0.1:80", "node-7"}),
		"verify-sample of the file": s.verify == 7,
		"integrity of the default":  s.integrity == settings.IntegrityFull,
		"socket-dir of the default": s.socketDir == settings.DefaultSocketDir(),
	} {
		if !ok {
			t.Errorf("not the %s: %+v", what, s)
		}
	}
	s, err = readSettings(t, nil, map[string]string{"KVAGENT_CONFIG": filepath.Join(t.TempDir(), "none")}, "")
	if err == nil || !strings.Contains(err.Error(), "config") {
		t.Errorf("a file that is not there: %v, %+v", err, s)
	}
	s, err = readSettings(t, []string{"--config", "/dev/zero"}, nil, "")
	if err == nil || !strings.Contains(err.Error(), "config") || !strings.Contains(err.Error(), "allowed") {
		t.Errorf("a file without an end: %v, %+v", err, s)
	}
}

// A misspelt variable is told, and no more than that: clusters make variables for a service called
// kvagent.
func TestUnknownEnvironment(t *testing.T) {
	got := settings.UnknownEnv(serveCommand().Flags(), []string{"KVAGENT_POOOL=1GiB", "KVAGENT_POOL=1GiB",
		"KVAGENT_HTTP=x", "PATH=/bin", "KVAGENT_PORT=tcp://1.2.3.4:5"})
	if want := []string{"KVAGENT_POOOL", "KVAGENT_PORT"}; !slices.Equal(got, want) {
		t.Errorf("unknown are %q, want %q", got, want)
	}
}

// Errors name the key, the value and what is allowed, wherever the value comes from.
func TestSettingsErrors(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		env  map[string]string
		file string
		want []string
	}{
		"flag":          {[]string{"--pool", "1"}, nil, "", []string{"pool", `"1"`, "allowed: 64KiB to 2TiB"}},
		"size words":    {[]string{"--pool", "lots"}, nil, "", []string{"pool", `"lots"`, "allowed"}},
		"size negative": {[]string{"--pool=-1GiB"}, nil, "", []string{"pool", "allowed"}},
		"size huge":     {[]string{"--pool=9999999999TiB"}, nil, "", []string{"pool", "allowed"}},
		"env": {nil, map[string]string{"KVAGENT_KEEP_PERCENT": "51"}, "",
			[]string{"KVAGENT_KEEP_PERCENT", `"51"`, "allowed: 0 to 50"}},
		"file":          {nil, nil, "drain-timeout: 2h\n", []string{"drain-timeout", `"2h"`, "allowed: 0s to 1h0m0s"}},
		"former":        {nil, nil, "queue: 64\n", []string{"queue", "unknown", "allowed", "pool"}},
		"unknown key":   {nil, nil, "pol: 1GiB\n", []string{"pol", "unknown", "allowed", "pool"}},
		"key twice":     {nil, nil, "pool: 1GiB\npool: 2GiB\n", []string{"pool"}},
		"two documents": {nil, nil, "pool: 1GiB\n---\npool: 2GiB\n", []string{"config", "more than one document"}},
		"mapping":       {nil, nil, "pool: {a: 1}\n", []string{"pool", "mapping"}},
		"no mapping":    {nil, nil, "- pool\n", []string{"config"}},
		"config inside": {nil, nil, "config: x\n", []string{"config", "unknown"}},
		"choice": {[]string{"--integrity", "some"}, nil, "",
			[]string{"integrity", `"some"`, "allowed: full, header"}},
		"pace": {nil, nil, "pace: 3GiB\n", []string{"pace", `"3GiB"`, "allowed: auto, off, or 1MiB/s to 4TiB/s"}},
		"verify-sample": {[]string{"--verify-sample", "-1"}, nil, "",
			[]string{"verify-sample", `"-1"`, "allowed: 0 to 1000000000"}},
		"verify env": {nil, map[string]string{"KVAGENT_VERIFY_SAMPLE": "2000000000"}, "",
			[]string{"KVAGENT_VERIFY_SAMPLE", "allowed: 0 to 1000000000"}},
		"device": {[]string{"--device", "tpu"}, nil, "",
			[]string{"device", "allowed: auto, host, host-mover, cuda"}},
		"bool": {nil, map[string]string{"KVAGENT_LOG_JSON": "maybe"}, "",
			[]string{"KVAGENT_LOG_JSON", `"maybe"`, "allowed: true, false"}},
		"directory": {[]string{"--socket-dir", ""}, nil, "", []string{"socket-dir", "allowed: a directory"}},
		"directory long": {nil, map[string]string{"KVAGENT_SOCKET_DIR": "/" + strings.Repeat("d", 94)}, "",
			[]string{"socket-dir", "95 bytes", "allowed: 1 to 94"}},
		"uid": {[]string{"--allow-uid", "1,root"}, nil, "",
			[]string{"allow-uid", `"root"`, "allowed: numbers"}},
		"group": {[]string{"--socket-group", "no such group"}, nil, "",
			[]string{"socket-group", "allowed: the name or the number"}},
		"http": {[]string{"--http", "node-7:80"}, nil, "",
			[]string{"http", "node-7:80", "allowed: address:port in numbers"}},
		"http name": {[]string{"--http", "0.0.0.0:80,http://node-7"}, nil, "",
			[]string{"http", "http://node-7", "allowed after the address: names"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := readSettings(t, c.args, c.env, c.file)
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("%q does not say %q", err, want)
				}
			}
		})
	}
}

// Each setting has its place in one group of --help, and help has no more than a user can read.
func TestHelpGroupsAllSettings(t *testing.T) {
	const most = 28
	cmd, all := serveCommand(), 0
	usage := cmd.UsageString()
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if all++; f.Usage == "" || f.Hidden || strings.Count(usage, "\n      --"+f.Name+" ") != 1 {
			t.Errorf("--%s is not in the help once, with its meaning: %+v", f.Name, f)
		}
	})
	if all > most {
		t.Errorf("%d settings, allowed: %d; what only tests set is a constant that they replace", all, most)
	}
	for _, title := range []string{"Engines", "Memory", "Tiers", "Nodes", "Operation"} {
		if !strings.Contains(usage, "\n"+title+":\n      --") {
			t.Errorf("no group %s in %s", title, usage)
		}
	}
	if got := cmd.Flags().Lookup("pool").DefValue; got != "1GiB" {
		t.Errorf("default pool %s", got)
	}
}
