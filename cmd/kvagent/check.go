package main

import (
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/agent/adminclient"
	"github.com/kvagent/kvagent/settings"
)

// checks are the arguments of check, with the paths of admin.sock that answer them.
var checks = map[string]string{"live": "/livez", "ready": "/readyz"}

func checkCommand() *cobra.Command {
	dir := socketDirSetting()
	cmd := &cobra.Command{
		Use:   "check live|ready",
		Short: "Check whether a running agent is alive, or ready",
		Long: `Check asks the agent of a socket directory through admin.sock, for probes that run a command.
It ends with 0, or prints the reason and ends with 1: no agent answers, or the agent says why it does not serve.`,
		Example: `  kvagent check ready
  kvagent check live --socket-dir /run/kvagent`,
		Args: settings.Args(cobra.MatchAll(cobra.ExactArgs(1), checkArgument)),
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return settings.Invalid(settings.Fill(cmd.Flags(), os.LookupEnv))
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			_, err := adminclient.New(*dir).Get(cmd.Context(), checks[args[0]])
			if err != nil {
				return fmt.Errorf("not %s: %w", args[0], err)
			}
			return nil
		},
		ValidArgs: []string{"live", "ready"},
	}
	addSocketDir(cmd, dir)
	return cmd
}

func checkArgument(_ *cobra.Command, args []string) error {
	if _, known := checks[args[0]]; !known {
		return fmt.Errorf("%q, allowed: live, ready", args[0])
	}
	return nil
}

func setCommand() *cobra.Command {
	dir := socketDirSetting()
	cmd := &cobra.Command{
		Use:   "set loads=on|off saves=on|off",
		Short: "Switch loads or saves of a running agent",
		Long: `Set switches loads and saves off and on while the agent runs. With loads off, look-ups find nothing and
engines compute; with saves off, nothing new is stored. Engines are notified at once.`,
		Example: `  kvagent set loads=off
  kvagent set loads=on saves=on --socket-dir /run/kvagent`,
		Args: settings.Args(cobra.MinimumNArgs(1)),
		PreRunE: func(cmd *cobra.Command, _ []string) error {
			return settings.Invalid(settings.Fill(cmd.Flags(), os.LookupEnv))
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			query, err := parseSwitches(args)
			if err != nil {
				return settings.Invalid(err)
			}
			body, err := adminclient.New(*dir).Post(cmd.Context(), "/set?"+query.Encode(), nil)
			if err != nil {
				return err
			}
			var now admin.SwitchState
			if err := json.Unmarshal(body, &now); err != nil {
				return fmt.Errorf("set: %w", err)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "loads=%s saves=%s\n", onOff(now.Loads), onOff(now.Saves))
			return err
		},
		ValidArgs: []string{"loads=on", "loads=off", "saves=on", "saves=off"},
	}
	addSocketDir(cmd, dir)
	return cmd
}

// parseSwitches parses arguments such as loads=on saves=off.
func parseSwitches(args []string) (url.Values, error) {
	query := url.Values{}
	for _, arg := range args {
		key, value, _ := strings.Cut(arg, "=")
		if key != "loads" && key != "saves" {
			return nil, fmt.Errorf("%s: unknown, allowed: loads=on, loads=off, saves=on, saves=off", arg)
		}
		if query.Has(key) {
			return nil, fmt.Errorf("%s: given twice, allowed: once", key)
		}
		if _, err := admin.ParseSwitch(key, value); err != nil {
			return nil, err
		}
		query.Set(key, value)
	}
	return query, nil
}
