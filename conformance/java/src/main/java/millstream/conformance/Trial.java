package millstream.conformance;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;

/**
 * Runs suites of checks against a broker: {@code Trial ADDRESS SERVED ONLY SUITE...}. A suite is a class of this
 * package; ONLY is a part of the names of the checks to run, empty for all.
 */
public final class Trial {
    private static final BufferedReader RESPONSES =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));

    private Trial() {}

    /** A set of checks that belong together. */
    public interface Suite {
        void run(Clients clients, Report report) throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        Report report = new Report(new Served(arguments[1]), arguments[2]);
        Clients clients = new Clients(arguments[0]);
        for (int index = 3; index < arguments.length; index++) {
            Class<?> suite = Class.forName("millstream.conformance." + arguments[index]);
            report.begin(suite.getSimpleName());
            ((Suite) suite.getDeclaredConstructor().newInstance()).run(clients, report);
        }
        // Clients of checks that failed may still be running.
        Runtime.getRuntime().halt(report.end() ? 0 : 1);
    }

    /** Ask the driver, which owns the broker's process, for something, and wait until it is done. */
    public static void ask(String what) throws IOException {
        System.out.println("@" + what);
        System.out.flush();
        Wrong.unlessEqual("the driver's response", "done", RESPONSES.readLine());
    }
}
